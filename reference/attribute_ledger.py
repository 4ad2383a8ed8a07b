"""The attributes of every parameter, recorded once from the live ones and compared after every hop."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from weightsync.reference.errors import AttributeMismatch, Finding, PlanMismatch
from weightsync.reference.params import TPAttributes, differences, read


class AttributeLedger:
    """What the live parameters carried when they were recorded. It keeps no tensor alive.

    A hop is whatever makes new tensors of them: the snapshot, the move to a device, the fp32 master, a gather.
    Check after every one: the hop that lost an attribute is then named by the error, and not the reader that
    trusted a default much later.

    Args:
        live: name -> live parameter of this rank.
    """

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        self._recorded = {name: read(tensor) for name, tensor in live.items()}

    def __getitem__(self, name: str) -> TPAttributes:
        """The attributes recorded for ``name``.

        Raises:
            PlanMismatch: nothing was.
        """
        if name not in self._recorded:
            raise PlanMismatch(
                f"parameter {name!r} is not in the ledger, expected one of {len(self._recorded)} recorded; "
                "make the ledger from all live parameters"
            )
        return self._recorded[name]

    def check(
        self,
        hop: str,
        params: Mapping[str, Tensor],
        *,
        part: bool = False,
        gathered: bool = False,
        moved_from: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Raise if any tensor carries other attributes than its live parameter did.

        Args:
            hop: what was just done, for the error.
            params: name -> tensor after it.
            part: True when the hop carries some of the parameters only, such as one bucket.
            gathered: True when the tensors are whole; they must then carry no attribute of a cut, and all others.
            moved_from: the tensors before the hop, when it was a move or a copy. A new object is demanded then:
                on one device ``tensor.to(device)`` returns its argument, attributes and all, so it proves nothing
                about a move that does happen.

        Raises:
            AttributeMismatch: with one finding per attribute.
            PlanMismatch: a tensor has no recorded name, is missing, or is the very object it was moved from.
        """
        missing = [name for name in self._recorded if name not in params]
        if missing and not part:
            raise PlanMismatch(
                f"after hop {hop!r} parameters {missing} are missing, expected all {len(self._recorded)} "
                "recorded; say part=True if this hop carries some of them only"
            )
        for name, before in (moved_from or {}).items():
            if params.get(name) is before:
                raise PlanMismatch(
                    f"after hop {hop!r} parameter {name!r} is the object it was before, expected a new one; "
                    "use params.fresh_copy, which always makes one"
                )
        findings = []
        for name, tensor in params.items():
            expected = self[name].uncut() if gathered else self[name]
            findings += _findings(name, read(tensor), expected)
        if findings:
            advice = (
                "stamp a gathered tensor with ledger[name].uncut()"
                if gathered
                else "call params.carry at every copy; if the live parameter changed, refresh the ledger first"
            )
            raise AttributeMismatch(hop, findings, advice)

    def refresh(self, live: Mapping[str, Tensor]) -> tuple[Finding, ...]:
        """Record what appeared on live parameters since; copies made before then fail ``check``.

        Megatron stamps some parameters late, after a first backup was made of them.

        Returns:
            One finding per attribute that is new; empty when nothing appeared.

        Raises:
            AttributeMismatch: a recorded attribute is gone or has another value. Nothing is recorded then.
            PlanMismatch: a parameter was never recorded.
        """
        found = {name: read(tensor) for name, tensor in live.items()}
        findings = [finding for name in found for finding in _findings(name, found[name], self[name])]
        lost = [finding for finding in findings if finding.attribute in self[finding.parameter].values]
        if lost:
            raise AttributeMismatch(
                "refresh",
                lost,
                "what was true of the live parameter must stay so; make a new ledger for a new cut",
            )
        self._recorded.update(found)
        return tuple(findings)


def _findings(name: str, found: TPAttributes, expected: TPAttributes) -> list[Finding]:
    return [Finding(name, *difference) for difference in differences(found, expected)]
