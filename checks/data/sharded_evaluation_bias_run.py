"""How evaluation is divided between the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from ddpdoctor.diagnosis.training.pass_lengths import (
    LoaderOnRanks,
    compare_samples,
    loaders_on_all_ranks,
    trains_on_own_data,
)
from ddpdoctor.diagnosis.wording import rank_list, site_location
from ddpdoctor.finding import Location
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.training import Pass

MOST_SHARED = 0.5
"""Share of its samples that a rank may have in common with others where the evaluation is divided."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """A loop of all ranks over one loader without gradients."""

    form: str
    """``repeated``: the whole data set on every rank. ``padded``: averaged over shards that repeat samples.
    ``divided``: neither."""
    sentence: str
    location: Location | None
    """The loop."""
    loader_location: Location | None
    ranks: tuple[int, ...]
    numbers: Mapping[str, int | float] = {}


def judge_evaluations(record: RunRecord) -> Iterator[Evaluation]:
    """Yield a verdict for each loader that every rank of a DDP job evaluates on and none trains on."""
    if not trains_on_own_data(record) or not record.backwards:
        return
    for loader in loaders_on_all_ranks(record):
        entries = next(loader.pass_places(), None)
        if entries is None or any(entry.backwards for passes in loader.passes for entry in passes):
            continue
        if not all(_evaluates(record, entry) for entry in entries) or any(not entry.index_count for entry in entries):
            continue
        if min(entry.true_length or 0 for entry in entries) < 2:
            continue
        verdict = _judge(record, loader, entries)
        if verdict is not None:
            yield verdict


def _evaluates(record: RunRecord, entry: Pass) -> bool:
    return any(
        forward.rank == entry.rank and forward.pass_loader == entry.loader and not forward.gradients
        for forward in record.forwards
    )


def _judge(record: RunRecord, loader: LoaderOnRanks, entries: tuple[Pass, ...]) -> Evaluation | None:
    counts = [entry.index_count or 0 for entry in entries]
    total = loader.loaders[0].dataset_length or 0
    verdict = Evaluation(
        form="divided",
        sentence="",
        location=site_location(record.site(entries[0].site)),
        loader_location=loader.location,
        ranks=loader.ranks,
        numbers={"samples": total, "samples_drawn": sum(counts), "ranks": len(counts)},
    )
    if len({entry.index_digest for entry in entries}) == 1:
        if counts[0] < total or compare_samples(loader.loaders) != "same" or _all_shard(loader):
            return None
        return msgspec.structs.replace(
            verdict,
            form="repeated",
            sentence=f"{rank_list(loader.ranks)} each evaluate all {total:,} samples, and get the same result",
        )
    repeated = sum(counts) - total
    if _all_shard(loader) and 0 < repeated < len(counts) and _averages(record, entries):
        return msgspec.structs.replace(
            verdict,
            form="padded",
            sentence=f"the ranks' results are averaged over shards that count {repeated:,} of {total:,} samples twice",
        )
    if all(entry.indices for entry in entries):
        drawn = [set(entry.indices) for entry in entries]
        shared = len(set.intersection(*drawn))
        if shared <= MOST_SHARED * min(map(len, drawn)):
            reason = f"{rank_list(loader.ranks)} draw {min(counts):,} samples each, {shared:,} of them the same"
            return msgspec.structs.replace(verdict, sentence=reason)
    return None


def _all_shard(loader: LoaderOnRanks) -> bool:
    return all(entry.sampler_shards for entry in loader.loaders)


def _averages(record: RunRecord, entries: tuple[Pass, ...]) -> bool:
    """Return whether every rank averages something over the ranks right after it evaluated, before it trains on."""
    for entry in entries:
        track = record.track(entry.rank)
        evaluated = [
            forward.time_ns
            for forward in record.forwards
            if forward.rank == entry.rank and forward.pass_loader == entry.loader and not forward.gradients
        ]
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
