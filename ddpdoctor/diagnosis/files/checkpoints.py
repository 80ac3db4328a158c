"""How the ranks load checkpoints: onto which GPU, and into names that fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

import msgspec

from ddpdoctor.diagnosis.failures.named import named_failures
from ddpdoctor.diagnosis.wording import rank_list, site_location
from ddpdoctor.finding import Location
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.devices import CheckpointLoad, StateNames


class LoadVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the loads at one line."""

    wrong: bool
    sentence: str
    location: Location
    ranks: tuple[int, ...] = ()
    fact: str = ""


def judge_map_locations(record: RunRecord) -> Iterator[LoadVerdict]:
    """Yield the lines at which several ranks load one checkpoint onto the GPU from which it was saved.

    Refuted where every load was given a place, or where the checkpoint that was there before the job holds CPU tensors
    only: what the ranks of a rehearsal save themselves says nothing of a job on GPUs.
    """
    own = {event.path for event in record.files if event.action in ("save", "create", "write", "rename")}
    lines: dict[int, list[CheckpointLoad]] = {}
    for load in record.checkpoint_loads:
        lines.setdefault(load.site, []).append(load)
    said: set[Location] = set()
    for site, loads in lines.items():
        location = site_location(record.site(site))
        if location is None:
            continue
        if all(load.mapped for load in loads):
            yield LoadVerdict(wrong=False, sentence="every load here has map_location", location=location)
            continue
        for path in dict.fromkeys(load.path for load in loads):
            found = [load for load in loads if load.path == path and not load.mapped]
            ranks = tuple(sorted({load.rank for load in found}))
            places = {place for load in found for place in load.saved_on}
            if len(ranks) > 1 and len(places) == 1 and next(iter(places)).startswith("cuda"):
                said.add(location)
                yield LoadVerdict(
                    wrong=True,
                    sentence=f"{rank_list(ranks)} load {PurePath(path).name} onto the GPU from which it was saved",
                    location=location,
                    ranks=ranks,
                    fact=f"its tensors were saved from {next(iter(places))}, and map_location is not given",
                )
            elif places == {"cpu"} and path not in own and len({load.path for load in loads}) == 1:
                reason = f"{PurePath(path).name} holds CPU tensors only"
                yield LoadVerdict(wrong=False, sentence=reason, location=location)
    for failure in named_failures(record, "missing-device"):
        if failure.location is not None and failure.location not in said:
            yield LoadVerdict(
                wrong=True,
                sentence=f"{rank_list(failure.ranks)} load a checkpoint onto the GPU from which it was saved",
                location=failure.location,
                ranks=failure.ranks,
                fact=failure.message,
            )


def judge_prefixes(record: RunRecord) -> Iterator[LoadVerdict]:
    """Yield the lines at which a state dict's names differ from the module's by the wrapper's prefix.

    A load that raised and was caught, or that was followed by one that fitted, was put right by the script.
    """
    lines: dict[int, list[StateNames]] = {}
    for state in record.state_names:
        lines.setdefault(state.site, []).append(state)
    for site, states in lines.items():
        location = site_location(record.site(site))
        wrong = [state for state in states if max(state.too_long, state.too_short) and not _put_right(record, state)]
        if location is None:
            continue
        if not wrong:
            if all(not state.names for state in states):
                yield LoadVerdict(wrong=False, sentence="the names match the module", location=location)
            continue
        first = wrong[0]
        saved, loaded = ("the DDP wrapper", "a bare model") if first.too_long else ("a bare model", "the DDP wrapper")
        fitting = first.too_long or first.too_short
        what = "the load fails" if first.raised else f"strict=False skips {fitting:,} of {first.names:,} names"
        yield LoadVerdict(
            wrong=True,
            sentence=f"{loaded} ({first.module_class}) loads what was saved from {saved}: the names differ by the "
            f'prefix "module.", and {what}',
            location=location,
            ranks=tuple(sorted({state.rank for state in wrong})),
            fact=f"{fitting:,} of {first.names:,} names match once the prefix is fixed",
        )


def _put_right(record: RunRecord, state: StateNames) -> bool:
    rank = record.of_rank(state.rank)
    if state.raised and (rank is None or rank.end != "raised"):
        return True
    return any(
        other.rank == state.rank
        and other.module_class == state.module_class
        and not other.names
        and other.time_ns > state.time_ns
        for other in record.state_names
    )
