"""Exceptions that say what is wrong with the use of DDP, in torch's words."""

from __future__ import annotations

import re

import msgspec

from ddpdoctor.diagnosis.failures.named import trouble_of
from ddpdoctor.diagnosis.wording import location_of
from ddpdoctor.finding import Frame, Location, Trouble
from ddpdoctor.record.model import RankException, RunRecord, Wrap

_INDEX = re.compile(r"Parameter at index (\d+)")
_NAME = re.compile(r"with name ([\w.]+)")
_ATTRIBUTE = re.compile(r"has no attribute '(\w+)'")


class ReadyTwice(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter whose gradient came twice in one reduction."""

    ranks: tuple[int, ...]
    parameter: str
    """Its name; empty when it cannot be known."""
    reentrant: bool
    """Reentrant checkpointing was at work."""
    wrap_location: Location | None
    location: Location | None
    frames: tuple[Frame, ...]


class WrapperAttribute(msgspec.Struct, frozen=True, kw_only=True):
    """An attribute of the model that was asked of its DDP wrapper."""

    ranks: tuple[int, ...]
    attribute: str
    model: str
    location: Location | None
    frames: tuple[Frame, ...]


def ready_twice(record: RunRecord) -> ReadyTwice | None:
    """Return the first exception about a parameter that was marked ready twice."""
    failed = _ranks_with(record, "ready-twice")
    if not failed:
        return None
    rank, raised = failed[0]
    wrap = max((wrap for wrap in record.wraps if wrap.rank == rank), key=lambda wrap: wrap.wrap, default=None)
    return ReadyTwice(
        ranks=tuple(number for number, _ in failed),
        parameter=_parameter(raised.message, [wrap for wrap in record.wraps if wrap.rank == rank]),
        reentrant="torch/utils/checkpoint.py" in raised.traceback.replace("\\", "/"),
        wrap_location=None if wrap is None else location_of(record.site(wrap.site).innermost),
        location=location_of(raised.frames[0]) if raised.frames else None,
        frames=raised.frames,
    )


def wrapper_attribute(record: RunRecord) -> WrapperAttribute | None:
    """Return the first exception about an attribute that the wrapped model has and its wrapper has not."""
    failed = _ranks_with(record, "wrapper-attribute")
    if not failed:
        return None
    raised = failed[0][1]
    name = _ATTRIBUTE.search(raised.message)
    return WrapperAttribute(
        ranks=tuple(number for number, _ in failed),
        attribute=name[1] if name else "",
        model=raised.attribute_owner,
        location=location_of(raised.frames[0]) if raised.frames else None,
        frames=raised.frames,
    )


def _ranks_with(record: RunRecord, trouble: Trouble) -> list[tuple[int, RankException]]:
    found = []
    for rank in sorted(record.ranks, key=lambda entry: entry.rank):
        first = min(rank.exceptions, key=lambda entry: entry.time_ns, default=None) if rank.end == "raised" else None
        if first is not None and trouble_of(first) == trouble:
            found.append((rank.rank, first))
    return found


def _parameter(message: str, wraps: list[Wrap]) -> str:
    named = _NAME.search(message)
    if named:
        return named[1]
    index = _INDEX.search(message)
    if index is None or len(wraps) != 1:
        return ""
    listed = [t.name for t in wraps[0].parameters if t.requires_grad and t.name not in wraps[0].ignored]
    return listed[int(index[1])] if int(index[1]) < len(listed) else ""
