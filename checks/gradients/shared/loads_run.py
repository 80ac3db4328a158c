"""Training state that some ranks load and the others never get."""

from __future__ import annotations

from typing import Literal

import msgspec

from ddpdoctor.diagnosis.training.replicas import judged_wraps, parameters_around_steps
from ddpdoctor.diagnosis.training.unaveraged import unaveraged
from ddpdoctor.diagnosis.wording import site_location
from ddpdoctor.finding import Frame, Location
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.training import TrainingState


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """An object with training state that was loaded by some rank at least."""

    kind: Literal["optimizer", "scheduler", "scaler"]
    type: str
    loaded: tuple[int, ...]
    """Ranks that loaded it."""
    others: tuple[int, ...]
    """Ranks that have one as well and did not."""
    differs: bool
    """What it held at the first step on the ranks that loaded it is not what it held on the others; of a late load that
    the parameters parted later."""
    late: bool
    """It was loaded after the first step."""
    wraps: tuple[int, ...]
    """Wraps whose parameters it steers; empty when that is not known."""
    location: Location | None
    frames: tuple[Frame, ...]


def loads(record: RunRecord) -> tuple[Load, ...]:
    """Return what was loaded before or after the first step, one entry for each object that all ranks have.

    A late load is left out where nothing shows what came of it.
    """
    by_object: dict[tuple[str, int], list[TrainingState]] = {}
    for state in record.training_states:
        by_object.setdefault((state.kind, state.number), []).append(state)
    found = []
    for _, states in sorted(by_object.items()):
        holders = {state.rank for state in states}
        with_load = [state for state in states if state.loads or state.late_loads]
        if holders != set(record.rank_numbers()) or len({state.type for state in states}) > 1 or not with_load:
            continue
        late = not any(state.loads for state in with_load)
        digests = {state.digest for state in with_load}
        differs = any(state.digest not in digests for state in states)
        if late:
            differs = len(with_load) < len(states) and _parted_later(record, with_load[0].wraps)
        if late and not differs:
            continue
        site = record.site((with_load[0].loads + with_load[0].late_loads)[0])
        found.append(
            Load(
                kind=states[0].kind,
                type=states[0].type,
                loaded=tuple(sorted(state.rank for state in with_load)),
                others=tuple(sorted(holders - {state.rank for state in with_load})),
                differs=differs,
                late=late,
                wraps=with_load[0].wraps,
                location=site_location(site),
                frames=site.frames,
            )
        )
    return tuple(found)


def lone_loads(record: RunRecord) -> tuple[Load, ...]:
    """Return the loads that left the ranks with different states."""
    return tuple(load for load in loads(record) if load.others and load.differs)


def _parted_later(record: RunRecord, wraps: tuple[int, ...]) -> bool:
    """Return whether parameters that were equal after the first step differ after a later one, on averaged
    gradients.
    """
    unaveraged_wraps = {reason.wrap for reason in unaveraged(record)}
    for members in judged_wraps(record):
        wrap, ranks = members[min(members)].wrap, tuple(members)
        if wrap not in wraps or wrap in unaveraged_wraps:
            continue
        unequal = {step.ordinal: bool(step.unequal) for step in parameters_around_steps(record, wrap, ranks)}
        if unequal.get(1) is False and any(unequal.values()):
            return True
    return False
