"""Whose NaN it was: on which ranks values were first not finite, and what came to the others by the reduction."""

from __future__ import annotations

from typing import Literal

import msgspec

from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.training import NonFinite

Cause = Literal["data", "outside", "forward", "loss", "backward", "optimizer", "changed", "unknown"]
"""The batch; a value that the graph only takes in; an operation of the model; one of the loss; one of the backward, or
the gradient; the step of the optimizer, of finite gradients; parameters that changed elsewhere; not known."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a training was first not finite."""

    cause: Cause
    first: NonFinite
    """The row of the first rank that shows it."""
    ranks: tuple[int, ...]
    """All ranks on which it began at once; empty where it is not known on which."""
    received: tuple[int, ...]
    """Those that were finite until the reduction, or later."""
    broken: int
    """Parameters that are not finite since, on the rank where they are most."""


def origin(record: RunRecord) -> Origin | None:
    """Return where it began; None where parameters have stayed finite, or the rehearsal itself injected it."""
    if record.job.stress:
        return None
    rows = list({(row.rank, row.backward, row.kind): row for row in record.nonfinites}.values())
    ends = [row for row in rows if row.kind == "parameter" or row.streak]
    if not ends:
        return None
    last = min(row.backward for row in ends)
    begun = [row for row in rows if row.kind != "parameter" and row.backward <= last]
    own = [row for row in ends if row.backward == last and row.kind == "parameter" and row.gradients_finite]
    if begun:
        at = min(row.backward for row in begun)
        first = [row for row in begun if row.backward == at]
    else:
        at, first = last, own or [row for row in ends if row.backward == last]
    first.sort(key=lambda row: row.rank)
    leader = max(first, key=lambda row: _WEIGHT.get(_cause(row), 0))
    cause = _cause(leader)
    alike = tuple(row.rank for row in first if _cause(row) == cause)
    known = cause != "unknown" or len(first) < len(record.ranks)
    return Origin(
        cause=cause,
        first=leader,
        ranks=alike if known else (),
        received=tuple(sorted({row.rank for row in ends} - set(alike))) if known else (),
        broken=max((row.broken for row in ends), default=0),
    )


_WEIGHT = {"data": 6, "outside": 5, "forward": 4, "loss": 3, "backward": 2, "optimizer": 1}
"""Of what several ranks show in one step the earliest in it is told."""


def _cause(row: NonFinite) -> Cause:
    if row.kind == "parameter":
        if row.gradients_finite:
            return "optimizer"
        return "changed" if row.sampled and not row.after_step else "unknown"
    if row.batch_finite is False:
        return "data"
    if row.kind == "gradient":
        return "backward"
    if row.outside:
        return "outside"
    if row.operation:
        return "loss" if row.in_loss else "forward"
    return "unknown"
