"""Whether all ranks draw the same random numbers for the samples that they train on."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.checks.data.sharding_run import judge_sharding
from ddpdoctor.diagnosis.training.pass_lengths import LoaderOnRanks, feeds_ddp, loaders_on_all_ranks
from ddpdoctor.diagnosis.wording import location_of, rank_list
from ddpdoctor.finding import Location
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.setup import Library, RandomState

_GENERATORS = {"torch": "torch's", "numpy": "numpy's", "random": "Python's"}


class SharedRandomness(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the generators when the first training batch was fetched."""

    shared: bool
    sentence: str
    locations: tuple[Location, ...]
    """Shared: the common seed, where it was seen. Otherwise every line on the way to a seeding."""
    draw: Location | None = None
    """The code that draws, or the line that makes the loader."""
    ranks: tuple[int, ...] = ()


def judge_randomness(record: RunRecord) -> Iterator[SharedRandomness]:
    """Yield a verdict for each place at which the samples of a divided training data set draw from generators.

    Ranks that draw the same samples are the matter of another check. Workers are compared with the worker of the same
    number on the other ranks.
    """
    ranks = record.rank_numbers()
    alike = {sharding.location for sharding in judge_sharding(record) if sharding.duplicated}
    shared: dict[Location | None, dict[Library, None]] = {}
    for loader in loaders_on_all_ranks(record):
        if loader.location in alike or not all(feeds_ddp(record, entry) for entry in loader.loaders):
            continue
        for library in ("torch", "numpy", "random"):
            states = _first_states(record, loader, library)
            if len(states) != len(ranks) or not all(state.drawn_from for state in states):
                continue
            if len({state.digest for state in states}) == 1:
                shared.setdefault(_draw(states[0]) or loader.location, {})[library] = None
            elif len({state.digest for state in states}) == len(states):
                yield SharedRandomness(
                    shared=False,
                    sentence=f"{_GENERATORS[library]} generator differed between the ranks at the first training batch",
                    locations=_seed_lines(record, library),
                )
    for draw, libraries in shared.items():
        names = " and ".join(_GENERATORS[library] for library in libraries)
        yield SharedRandomness(
            shared=True,
            sentence=f"{rank_list(ranks)} apply the same augmentation: {names} "
            f"generator{'s' if len(libraries) > 1 else ''}, which "
            "the samples draw from, had the same state on all of them at the first training batch",
            locations=tuple(place for library in libraries for place in _seed_lines(record, library)[:1]),
            draw=draw,
            ranks=ranks,
        )


def _first_states(record: RunRecord, loader: LoaderOnRanks, library: Library) -> list[RandomState]:
    """Return the state of each rank in the lowest worker that all of them fetched with; empty when there is none."""
    found: dict[int, dict[int, RandomState]] = {}
    for entry in loader.loaders:
        for state in record.random_states:
            if (state.rank, state.library, state.dataset_type, state.dataset_length) == (
                entry.rank,
                library,
                entry.dataset_type,
                entry.dataset_length,
            ):
                found.setdefault(state.worker, {}).setdefault(entry.rank, state)
    for worker in sorted(found):
        if len(found[worker]) == len(loader.loaders):
            return [found[worker][entry.rank] for entry in loader.loaders]
    return []


def _draw(state: RandomState) -> Location | None:
    return Location(file=state.file, line=state.line, end_line=state.end_line) if state.file else None


def _seed_lines(record: RunRecord, library: Library) -> tuple[Location, ...]:
    """Return the call chains of a library's seedings, the newest first and each from its innermost line."""
    newest_first = sorted(record.seedings, key=lambda entry: entry.time_ns, reverse=True)
    places = (
        location_of(frame)
        for seeding in newest_first
        if seeding.library == library
        for frame in record.site(seeding.site).frames
    )
    return tuple(dict.fromkeys(place for place in places if place is not None))
