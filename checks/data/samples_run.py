"""Whether data sets, splits and random numbers agree between ranks, and samples that evaluations count twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ddpdoctor.check import Verdict
from ddpdoctor.checks.data.rank_varying_dataset import NO_SAMPLER
from ddpdoctor.checks.data.sharding_run import judge_sharding
from ddpdoctor.diagnosis.training.pass_lengths import (
    Comparison,
    LoaderOnRanks,
    compare_samples,
    feeds_ddp,
    loaders_on_all_ranks,
    trains_on_own_data,
    uneven_passes,
)
from ddpdoctor.diagnosis.wording import location_of, rank_list, site_location
from ddpdoctor.finding import Location
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.setup import Library, Part, RandomState
from ddpdoctor.record.streams.training import Loader, Pass


def judge_rank_data(record: RunRecord) -> Iterator[Verdict]:
    """Yield a verdict for each loader whose sampler takes all ranks for the parts of one data set.

    Data that merely differ (made up at random on each rank) are left out: only another length, another order of the
    same rows, and a subset that was divided before are proofs that the sampler's division goes wrong.
    """
    found = list(_judged_rank_data(record))
    wrong = {place for verdict in found if verdict.wrong for place in verdict.places}
    # One line may make several loaders: what is right of one refutes nothing of another.
    yield from (verdict for verdict in found if verdict.wrong or wrong.isdisjoint(verdict.places))


def _judged_rank_data(record: RunRecord) -> Iterator[Verdict]:
    uneven = {entry.location for entry in uneven_passes(record)}
    for loader in loaders_on_all_ranks(record):
        own = loader.loaders
        if not all(entry.sampler_shards and entry.sampler_replicas == len(own) for entry in own):
            continue
        if loader.location in uneven:
            continue
        judges = (_divided_twice, _lengths, _divided_before, _order)
        verdict = next(filter(None, (judge(record, loader) for judge in judges)), None)
        if verdict is not None:
            yield verdict


def _places(record: RunRecord, loader: LoaderOnRanks) -> tuple[Location, ...]:
    sampler = site_location(record.site(loader.loaders[0].sampler_site))
    return tuple(dict.fromkeys(place for place in (sampler, loader.location) if place is not None))


def _lengths(record: RunRecord, loader: LoaderOnRanks) -> Verdict | None:
    lengths = {entry.rank: entry.dataset_length for entry in loader.loaders}
    if None in lengths.values() or len(set(lengths.values())) == 1:
        return None
    kind = loader.loaders[0].dataset_type
    place = next(iter(_places(record, loader)), None)
    return Verdict(
        sentence=f"{loader.loaders[0].sampler_type} divides a {kind} whose length differs between ranks",
        locations=_places(record, loader),
        ranks=loader.ranks,
        because=tuple((f"on rank {rank} it has {length:,} samples", place) for rank, length in lengths.items()),
        remedy="Build the same data set on every rank, and leave the division to the sampler.",
    )


def _divided_twice(record: RunRecord, loader: LoaderOnRanks) -> Verdict | None:
    """Compare the whole index lists where a sampler that divides by rank is within another one."""
    first, count = loader.loaders[0], len(loader.loaders)
    place = next((found for found in loader.pass_places() if all(entry.indices for entry in found)), None)
    if place is None or not all(entry.sampler_within for entry in loader.loaders):
        return None
    drawn, total = len(set().union(*(entry.indices for entry in place))), first.dataset_length or 0
    if 4 * drawn > 3 * total:
        return None  # Batches that are repeated to make the ranks' even may make up for what is left out.
    by = "Accelerate" if first.sampler_type == "BatchSamplerShard" else first.sampler_type
    numbers = {"samples_drawn": drawn, "samples": total, "ranks": count}
    return Verdict(
        sentence=f"{rank_list(loader.ranks)} together draw {drawn:,} of {total:,} samples in a pass: "
        f"{first.sampler_within} divides them by {count}, and {by} divides its batches again",
        locations=_places(record, loader),
        ranks=loader.ranks,
        because=(("the whole index lists of the ranks over this loader were compared", loader.location, numbers),),
        remedy=NO_SAMPLER,
    )


def _divided_before(record: RunRecord, loader: LoaderOnRanks) -> Verdict | None:
    parts = [_part(record, entry) for entry in loader.loaders]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or len({part.digest for part in known}) == 1:
        return None
    if split_parts(record) & {(part.rank, part.part) for part in known}:
        return None
    firsts = [next((entry.indices for entry in passes if entry.indices), ()) for passes in loader.passes]
    if not all(firsts):
        return None
    drawn, total = set[int]().union(*firsts), known[0].base_length
    return Verdict(
        sentence=f"{loader.loaders[0].sampler_type} divides a subset that differs between the ranks: together they "
        f"draw {len(drawn):,} of {total:,} samples",
        locations=_places(record, loader),
        ranks=loader.ranks,
        because=tuple(
            (
                f"the subset of rank {part.rank} holds {part.count:,} of {total:,} samples, different ones from those "
                f"of rank {known[0].rank}",
                next(iter(_places(record, loader)), None),
                {} if number else {"samples_drawn": len(drawn), "samples": total, "ranks": len(known)},
            )
            for number, part in enumerate(part for part in known[1:3] if part.digest != known[0].digest)
        ),
        remedy="Divide once: give the sampler the whole data set, which it divides in parts of one length.",
    )


def _order(record: RunRecord, loader: LoaderOnRanks) -> Verdict | None:
    holdings = [_holdings(record, entry) for entry in loader.loaders]
    names = set.intersection(*map(set, holdings)) if holdings else set()
    if compare_samples(loader.loaders) == "same":
        known = bool(names) or _are_whole(record, loader)
        if not known or any(len({held[name][0] for held in holdings}) > 1 for name in names):
            return None
        return Verdict(
            wrong=False,
            sentence="the samples behind equal indices are the same on all ranks",
            locations=_places(record, loader),
            ranks=loader.ranks,
        )
    for name in sorted(names):
        found = [held[name] for held in holdings]
        if len({ordered for ordered, _ in found}) > 1 and len({unordered for _, unordered in found}) == 1:
            kind = loader.loaders[0].dataset_type
            return Verdict(
                sentence=f"{loader.loaders[0].sampler_type} divides a {kind} whose order of samples differs between "
                "ranks",
                locations=_places(record, loader),
                ranks=loader.ranks,
                because=(
                    f"`{name}` holds the same rows on {rank_list(loader.ranks)}, in different orders",
                    next(iter(_places(record, loader)), None),
                ),
                remedy="Seed every rank with the same number before the data set is built, or leave the shuffling to "
                "the sampler.",
            )
    return None


FEWEST_SAMPLES = 16
"""Of a data set whose first two, middle and last sample would not be the same by chance where ranks shuffle it."""


def _are_whole(record: RunRecord, loader: LoaderOnRanks) -> bool:
    """Return whether samples of the whole data set were compared, at its ends and in its middle: of no subset."""
    return all(
        _part(record, one) is None and (one.dataset_length or 0) >= FEWEST_SAMPLES and len(one.samples) > 3
        for one in loader.loaders
    )


def _part(record: RunRecord, loader: Loader) -> Part | None:
    return next((part for part in record.parts if (part.rank, part.part) == (loader.rank, loader.part)), None)


def _holdings(record: RunRecord, loader: Loader) -> dict[str, tuple[str, str]]:
    """Return what the innermost data set of a loader holds: attribute -> ordered and unordered digest."""
    part = _part(record, loader)
    kind, length = (loader.dataset_type, loader.dataset_length) if part is None else (part.base_type, part.base_length)
    return {
        held.attribute: (held.ordered_digest, held.unordered_digest)
        for held in record.holdings
        if (held.rank, held.dataset_type, held.dataset_length) == (loader.rank, kind, length)
    }


# Whether all ranks split a data set in the same way.


def judge_splits(record: RunRecord) -> Iterator[Verdict]:
    """Yield a verdict for each split that all ranks made at the same lines with parts of the same sizes.

    Nothing is said where it is not known whether the ranks split the same data.
    """
    ranks = record.rank_numbers()
    if len(ranks) < 2:
        return
    splits = [list(_wholes(record, rank)) for rank in ranks]
    for split in zip(*splits, strict=False):
        if len({tuple((part.site, part.count, part.base_type, part.base_length) for part in own) for own in split}) > 1:
            return
        verdict = _judge(record, ranks, split)
        if verdict is not None:
            yield verdict


def split_parts(record: RunRecord) -> frozenset[tuple[int, int]]:
    """Rank and ordinal of each part that belongs to a split of a whole data set."""
    splits = (own for rank in record.rank_numbers() for own in _wholes(record, rank))
    return frozenset((part.rank, part.part) for own in splits for part in own)


def _wholes(record: RunRecord, rank: int) -> Iterator[tuple[Part, ...]]:
    """Runs of parts, made one after the other, that have each index of their data set once by number and sum."""
    run: list[Part] = []
    for part in sorted((part for part in record.parts if part.rank == rank), key=lambda entry: entry.part):
        if run and (part.base_type, part.base_length) != (run[0].base_type, run[0].base_length):
            run = []
        run.append(part)
        count, length = sum(entry.count for entry in run), part.base_length
        if count == length and sum(entry.index_sum for entry in run) == length * (length - 1) // 2:
            if len(run) > 1:
                yield tuple(run)
            run = []
        elif count >= length:
            run = []


def _judge(record: RunRecord, ranks: tuple[int, ...], split: Sequence[tuple[Part, ...]]) -> Verdict | None:
    first = split[0]
    different = tuple(number for number in range(len(first)) if len({own[number].digest for own in split}) > 1)
    places = (site_location(record.site(part.site)) for part in first)
    locations = tuple(dict.fromkeys(place for place in places if place is not None))
    counts = tuple(part.count for part in first)
    sizes = " and ".join((", ".join(f"{count:,}" for count in counts[:-1]), f"{counts[-1]:,}"))
    verdict = Verdict(
        wrong=False,
        sentence=f"{rank_list(ranks)} split the {first[0].base_length:,} samples into the same parts of {sizes}",
        locations=locations,
        ranks=ranks,
    )
    if not different:
        return verdict
    data = _data(record, split)
    if data == "different":
        reason = "the ranks split different data: the samples behind equal indices differ between them"
        return msgspec.structs.replace(verdict, sentence=reason)
    if data != "same":
        return None
    return msgspec.structs.replace(
        verdict,
        wrong=True,
        sentence=f"{rank_list(ranks)} split the {first[0].base_length:,} samples into parts of {sizes} differently: "
        "samples that one rank holds out are trained on by another",
        because=tuple(
            (
                f"the part of {counts[part]:,} samples holds other indices on another rank",
                locations[0] if locations else None,
                {"samples": counts[part], "samples_split": first[0].base_length},
            )
            for part in different[:3]
        ),
    )


def _data(record: RunRecord, split: Sequence[tuple[Part, ...]]) -> Comparison:
    """Compare the data beneath the parts, as the first loader showed that every rank made over one of them."""
    numbers = [{part.part: position for position, part in enumerate(own)} for own in split]
    for position in range(len(split[0])):
        loaders: list[Loader] = []
        for own, known in zip(split, numbers, strict=True):
            over = (one for one in record.loaders if one.rank == own[0].rank and known.get(one.part) == position)
            loaders += list(over)[:1]
        comparison = compare_samples(loaders) if len(loaders) == len(split) else "unknown"
        if comparison in ("same", "different"):
            return comparison
    return "unknown"


# Whether all ranks draw the same random numbers for the samples that they train on.

_GENERATORS = {"torch": "torch's", "numpy": "numpy's", "random": "Python's"}


def judge_randomness(record: RunRecord) -> Iterator[Verdict]:
    """Yield a verdict for each place at which the samples of a divided training data set draw from generators.

    Ranks that draw the same samples are the matter of another check. Workers are compared with the worker of the same
    number on the other ranks.
    """
    ranks = record.rank_numbers()
    alike = {place for verdict in judge_sharding(record) if verdict.wrong for place in verdict.places}
    shared: dict[Location | None, dict[Library, None]] = {}
    for loader in loaders_on_all_ranks(record):
        if loader.location in alike or not all(feeds_ddp(record, entry) for entry in loader.loaders):
            continue
        for library in ("torch", "numpy", "random"):
            states = _first_states(record, loader, library)
            if len(states) != len(ranks) or not all(state.drawn_from for state in states):
                continue
            if len({state.digest for state in states}) == 1:
                first = states[0]
                draw = loader.location
                if first.file:
                    draw = Location(file=first.file, line=first.line, end_line=first.end_line)
                shared.setdefault(draw, {})[library] = None
            elif len({state.digest for state in states}) == len(states):
                yield Verdict(
                    wrong=False,
                    sentence=f"{_GENERATORS[library]} generator differed between the ranks at the first training batch",
                    locations=_seed_lines(record, library),
                )
    for line, libraries in shared.items():
        names = " and ".join(_GENERATORS[library] for library in libraries)
        yield Verdict(
            sentence=f"{rank_list(ranks)} apply the same augmentation: {names} "
            f"generator{'s' if len(libraries) > 1 else ''}, which "
            "the samples draw from, had the same state on all of them at the first training batch",
            locations=(*(place for library in libraries for place in _seed_lines(record, library)[:1]), line),
            ranks=ranks,
            because=("fetching the batch drew from it here", line),
        )


def _first_states(record: RunRecord, loader: LoaderOnRanks, library: Library) -> list[RandomState]:
    """Return the state of each rank in the lowest worker that all of them fetched with; empty when there is none."""
    found: dict[int, dict[int, RandomState]] = {}
    for entry in loader.loaders:
        wanted = (entry.rank, library, entry.dataset_type, entry.dataset_length)
        for state in record.random_states:
            if (state.rank, state.library, state.dataset_type, state.dataset_length) == wanted:
                found.setdefault(state.worker, {}).setdefault(entry.rank, state)
    for worker in sorted(found):
        if len(found[worker]) == len(loader.loaders):
            return [found[worker][entry.rank] for entry in loader.loaders]
    return []


def _seed_lines(record: RunRecord, library: Library) -> tuple[Location, ...]:
    """Return the call chains of a library's seedings, the newest first and each from its innermost line."""
    newest_first = sorted(record.seedings, key=lambda entry: entry.time_ns, reverse=True)
    sites = (record.site(seeding.site) for seeding in newest_first if seeding.library == library)
    places = (location_of(frame) for site in sites for frame in site.frames)
    return tuple(dict.fromkeys(place for place in places if place is not None))


# How evaluation is divided between the ranks.

MOST_SHARED = 0.5
"""Share of its samples that a rank may have in common with others where the evaluation is divided."""


def judge_evaluations(record: RunRecord, remedies: Mapping[str, str]) -> Iterator[Verdict]:
    """Yield a verdict for each loader that every rank of a DDP job evaluates on and none trains on."""
    if not trains_on_own_data(record) or not record.backwards:
        return
    for loader in loaders_on_all_ranks(record):
        entries = next(loader.pass_places(), None)
        if entries is None or any(entry.backwards for passes in loader.passes for entry in passes):
            continue
        counted = _counted_twice(record, loader, entries, remedies)
        if counted is not None:
            yield counted
            continue
        whole = all(_evaluated_ns(record, entry) and entry.index_count for entry in entries)
        if not whole or min(entry.true_length or 0 for entry in entries) < 2:
            continue
        verdict = _judge_evaluations(record, loader, entries, remedies)
        if verdict is not None and verdict.places:
            yield verdict


def _evaluated_ns(record: RunRecord, entry: Pass) -> list[int]:
    """Return when the rank of a pass ran forwards without gradients on batches of its loader."""
    forwards = (one for one in record.forwards if (one.rank, one.pass_loader) == (entry.rank, entry.loader))
    return [forward.time_ns for forward in forwards if not forward.gradients]


def _judge_evaluations(
    record: RunRecord, loader: LoaderOnRanks, entries: tuple[Pass, ...], remedies: Mapping[str, str]
) -> Verdict | None:
    counts = [entry.index_count or 0 for entry in entries]
    total = loader.loaders[0].dataset_length or 0
    verdict = Verdict(
        sentence="",
        locations=site_location(record.site(entries[0].site)),
        ranks=loader.ranks,
        because=(
            "the whole index lists of the ranks over this loader were compared",
            loader.location,
            {"samples": total, "samples_drawn": sum(counts), "ranks": len(counts)},
        ),
    )
    if len({entry.index_digest for entry in entries}) == 1:
        if counts[0] < total or compare_samples(loader.loaders) != "same" or _all_shard(loader):
            return None
        return msgspec.structs.replace(
            verdict,
            sentence=f"{rank_list(loader.ranks)} each evaluate all {total:,} samples, and get the same result",
            remedy=remedies["repeated"],
        )
    repeated = sum(counts) - total
    if _all_shard(loader) and 0 < repeated < len(counts) and _averages(record, entries):
        return msgspec.structs.replace(
            verdict,
            sentence=f"the ranks' results are averaged over shards that count {repeated:,} of {total:,} samples twice",
            remedy=remedies["padded"],
        )
    if all(entry.indices for entry in entries):
        drawn = [set(entry.indices) for entry in entries]
        shared = len(set.intersection(*drawn))
        if shared <= MOST_SHARED * min(map(len, drawn)):
            reason = f"{rank_list(loader.ranks)} draw {min(counts):,} samples each, {shared:,} of them the same"
            return msgspec.structs.replace(verdict, wrong=False, sentence=reason)
    return None


def _counted_twice(
    record: RunRecord, loader: LoaderOnRanks, entries: tuple[Pass, ...], remedies: Mapping[str, str]
) -> Verdict | None:
    """Return a verdict if the ranks sum up counts that take in all samples of shards which a sampler padded."""
    counts = {entry.rank: entry.index_count or 0 for entry in entries}
    total, trained = loader.loaders[0].dataset_length or 0, {one.index_count for one in record.passes if one.backwards}
    counted = sum(counts.values())
    if not _all_shard(loader) or not total < counted < total + len(counts) or trained & set(counts.values()):
        return None
    places: dict[int, set[int]] = {}
    for row in record.reduced_counts:
        if counts.get(row.rank, 0) in row.numbers:
            places.setdefault(row.rank, set()).add(row.site)
    if places.keys() != counts.keys():
        return None
    return Verdict(
        sentence=f"{total:,} samples are counted as {counted:,}: the sampler repeats {counted - total:,} of them, and "
        "the sums over the ranks take them in",
        remedy=remedies["counted"],
        locations=site_location(record.site(entries[0].site)),
        ranks=loader.ranks,
        because=(
            "each rank adds the number of all samples of its part here",
            site_location(record.site(min(places[entries[0].rank]))),
            {"samples": total, "samples_counted": counted, "ranks": len(counts)},
        ),
    )


def _all_shard(loader: LoaderOnRanks) -> bool:
    return all(entry.sampler_shards for entry in loader.loaders)


def _averages(record: RunRecord, entries: tuple[Pass, ...]) -> bool:
    """Return whether every rank averages something over the ranks right after it evaluated, before it trains on."""
    for entry in entries:
        track = record.track(entry.rank)
        evaluated = _evaluated_ns(record, entry)
        if track is None or not evaluated:
            return False
        following = [
            record.signatures[signature]
            for signature, started_ns in zip(track.signature, track.started_ns, strict=True)
            if started_ns > evaluated[-1]
        ]
        own = next((signature for signature in following if signature.origin == "user"), None)
        if own is None or own.reduce_op != "avg" or following[0] is not own:
            return False
    return True
