"""Ranks that build different models, as DDP's constructor tells it."""

from __future__ import annotations

import re

import msgspec

from ddpdoctor.diagnosis.divergence.divergence import root_exception
from ddpdoctor.diagnosis.wording import location_of
from ddpdoctor.finding import Location
from ddpdoctor.record.model import RunRecord

_COUNTS = re.compile(
    r"expects same model across all ranks.*?rank (\d+) has (\d+) params.*?inconsistent (\d+) params", re.IGNORECASE
)
_SIZES = re.compile(r"params\[(\d+)\] in this process with sizes \[([\d, ]*)\] appears not to match sizes")
MOST_PARAMETERS = 1_000_000
"""Counts beyond are what a rank read of another collective, no number of parameters."""


class ModelMismatch(msgspec.Struct, frozen=True, kw_only=True):
    """Different models under one DDP wrap."""

    sentence: str
    location: Location | None
    ranks: tuple[int, ...]
    """The ranks that said so."""
    message: str
    """The first of the errors."""


def find_model_mismatch(record: RunRecord) -> ModelMismatch | None:
    """Find the error with which DDP refuses different models.

    A count of 0 says that the first collective failed, and a huge one that ranks were in different collectives: neither
    is about the models.
    """
    counts: dict[int, int] = {}
    said: dict[int, str] = {}
    location, message = None, ""
    for rank in record.ranks:
        raised = root_exception(rank)
        if raised is None:
            continue
        if found := _COUNTS.search(raised.message):
            own, other = int(found[2]), int(found[3])
            if not (0 < own < MOST_PARAMETERS and 0 < other < MOST_PARAMETERS):
                return None
            counts[int(found[1])] = own
            said[rank.rank] = f"rank {found[1]} has {own:,} parameters where another rank has {other:,}"
        elif found := _SIZES.search(raised.message):
            said[rank.rank] = (
                f"parameter {found[1]} has the shape [{found[2]}] on rank {rank.rank} and a different one on rank 0"
            )
        else:
            continue
        message = message or raised.message.strip().partition("\n")[0]
        location = location or location_of(raised.frames[0] if raised.frames else None)
    if not said:
        return None
    known = [f"rank {rank} has {count:,} parameters" for rank, count in sorted(counts.items())]
    told = ", ".join(known) if len(known) > 1 else next(iter(said.values()))
    return ModelMismatch(
        sentence=f"the ranks build DDP from different models: {told}",
        location=location,
        ranks=tuple(sorted(said)),
        message=message,
    )
