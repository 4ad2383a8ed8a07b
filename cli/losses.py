"""What became of rollouts that were lost: events for the record, and the checks of a run that survived them.

An event is JSON-ready: ``event``, ``rollout``, ``update`` (updates that were over, or for ``rejoined`` its number),
``at_ns`` (on the run's clock, from its first span on), and:

- ``lost``: ``rank`` whose process ended, ``how``, ``planned`` (by ``faults.kill``), ``ranks`` (all of the rollout);
- ``restarted``: ``ranks``, ``times`` (how often this rollout was started again so far);
- ``left out``: ``why`` it is not started again;
- ``rejoined``: ``version``, ``full`` (whether it was sent everything).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weightsync.cli.record import Event, RunRecord
from weightsync.cli.tables import CheckRow
from weightsync.reference.protocol import Outcome

RESTARTS = 3
"""How often the processes of one rollout are started again; after that it stays gone."""


def rejoins(outcomes: Sequence[Outcome], inside: Sequence[tuple[int, int]]) -> list[Event]:
    """An event for each rollout that was lost and committed again.

    Args:
        outcomes: the lead's.
        inside: when each of its updates began and ended, in ns.
    """
    return [
        {
            "event": "rejoined",
            "rollout": number,
            "update": outcome.update,
            "version": outcome.version,
            "full": number in outcome.full,
            "at_ns": ended,
        }
        for outcome, (_, ended) in zip(outcomes, inside, strict=True)
        for number in outcome.rejoined
    ]


def in_order(events: Sequence[Event], origin_ns: int) -> list[Event]:
    """The events as they happened, their times counted from ``origin_ns``."""
    return sorted(
        ({**event, "at_ns": event["at_ns"] - origin_ns} for event in events), key=lambda event: event["at_ns"]
    )


def sentence(event: Event) -> str:
    """The event in words."""
    which, update = f"rollout {event['rollout']}", event["update"]
    if event["event"] == "lost":
        return f"{which} is lost after update {update}: {_said(event)}"
    if event["event"] == "rejoined":
        sent = "a full update" if event["full"] else "a delta"
        return f"{which} rejoins in update {update}, with {sent}"
    if event["event"] == "restarted":
        return (
            f"{which} is started again, all {len(event['ranks'])} ranks, time {event['times']} of {RESTARTS}"
        )
    return f"{which} is left out: {event['why']}"


def commit_row(outcome: Outcome, record: RunRecord) -> CheckRow:
    """Whether an update committed; one that a lost rollout ended is right when a later one commits everywhere else."""
    if outcome.committed:
        return CheckRow(f"update {outcome.update} commits", True)
    lost, healer = _lost_with(outcome, record), _healer(outcome, record.outcomes)
    if lost is None or healer is None:
        return CheckRow(f"update {outcome.update} commits", False, f"not committed: {outcome.reason}")
    name = f"update {outcome.update} ends with a lost rollout ({_said(lost)}), update {healer.update} commits"
    return CheckRow(name, True, outcome.reason)


def return_rows(record: RunRecord) -> list[CheckRow]:
    """Every rollout that was lost before the last update is one of its members, and its bits were compared."""
    rows, last = [], record.outcomes[-1] if record.outcomes else None
    for number, lost in _last_losses(record).items():
        if last is None or lost["update"] >= last.update:
            continue
        returns = [
            event for event in record.events if event["event"] == "rejoined" and event["rollout"] == number
        ]
        if not returns or not last.committed or number not in last.members or number in last.gone:
            why = next(
                (e["why"] for e in record.events if e["event"] == "left out" and e["rollout"] == number), None
            )
            what = f"it was lost after update {lost['update']} ({_said(lost)}) and is not in the last update"
            rows.append(CheckRow(f"rollout {number} rejoined", False, f"{what}; {why}" if why else what))
            continue
        for event in returns:
            rows.append(_return_row(event, lost["ranks"], record, final=event is returns[-1]))
    return rows


def _return_row(event: Event, ranks: Sequence[str], record: RunRecord, *, final: bool) -> CheckRow:
    """One return; after the final one nobody was lost any more, so all its ranks must have been compared."""
    audited = {one.rank for one in record.audits if one.version == event["version"]}
    missing = [rank for rank in ranks if rank not in audited] if final else []
    detail = f"the bits of {', '.join(missing)} were not compared" if missing else ""
    return CheckRow(f"rollout {event['rollout']} rejoined in update {event['update']}", not missing, detail)


def _last_losses(record: RunRecord) -> dict[int, Event]:
    """Rollout -> its last loss."""
    return {event["rollout"]: event for event in record.events if event["event"] == "lost"}


def _lost_with(outcome: Outcome, record: RunRecord) -> Event | None:
    """The loss that an update which did not commit ended with, or None."""
    losses = {e["rollout"]: e for e in reversed(record.events) if e["event"] == "lost"}
    before = set(record.outcomes[outcome.update - 2].gone) if outcome.update > 1 else set()
    everyone = {number for one in record.outcomes for number in (*one.members, *one.gone)}
    found = [number for number in losses if _was_lost(number, outcome, record.outcomes, before)]
    if not found and everyone <= set(outcome.gone):
        found = [number for number in losses if number in outcome.gone]  # nobody was left to push to
    return losses[found[0]] if found else None


def _was_lost(number: int, outcome: Outcome, outcomes: Sequence[Outcome], before: set[int]) -> bool:
    """True when a rollout took part, or was to, and was lost before it took part in anything else."""
    if number in outcome.gone:
        return number in outcome.members or number not in before
    if number not in outcome.members:
        return False
    for later in outcomes[outcome.update :]:
        if number in later.gone or number in later.rejoined:
            return True
        if later.committed and number in later.members:
            return False
    return False


def _healer(outcome: Outcome, outcomes: Sequence[Outcome]) -> Outcome | None:
    """The first later update that committed on every rollout that was there."""
    everyone = {number for one in outcomes for number in (*one.members, *one.gone)}
    for later in outcomes[outcome.update :]:
        if later.committed and everyone - set(later.gone) <= set(later.members):
            return later
    return None


def _said(lost: Mapping[str, Any]) -> str:
    return f"{lost['rank']} {lost['how']}"
