"""Wire forms of a sparse delta: how positions and values become bytes, what it costs, and which to take."""

from weightsync.reference.wire.choosing import choose, choose_named
from weightsync.reference.wire.costs import Costs, Rates, estimated_bytes
from weightsync.reference.wire.forms import (
    ABSOLUTE,
    ALL_FORMS,
    DENSE_FORM,
    PLAIN_FORM,
    Form,
    Packing,
    Positions,
    Values,
)
from weightsync.reference.wire.positions import decode_window
from weightsync.reference.wire.rates import RATES
from weightsync.reference.wire.sections import Encoded, decode_section, encode_section
from weightsync.reference.wire.streams import Zstd
from weightsync.reference.wire.values import coded, resolve

__all__ = [
    "ABSOLUTE",
    "ALL_FORMS",
    "DENSE_FORM",
    "PLAIN_FORM",
    "RATES",
    "Costs",
    "Encoded",
    "Form",
    "Packing",
    "Positions",
    "Rates",
    "Values",
    "Zstd",
    "choose",
    "choose_named",
    "coded",
    "decode_section",
    "decode_window",
    "encode_section",
    "estimated_bytes",
    "resolve",
]  # fmt: skip
