"""Whether a shuffling, sharding sampler gives every training pass another order."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.diagnosis.wording import site_location
from ddpdoctor.finding import Location
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.training import Loader, Pass


class Epochs(msgspec.Struct, frozen=True, kw_only=True):
    """What two passes over one loader show."""

    repeated: bool
    """True: the same order twice and `set_epoch` never called. False: `set_epoch` was called and the order changed."""
    sentence: str
    location: Location | None
    """The line that made the loader."""
    samples: int
    """Indices of one pass on one rank."""
    first_pass: int
    second_pass: int
    passes: int


def judge_epochs(record: RunRecord) -> Iterator[Epochs]:
    """Yield a verdict for each line that makes a loader with a shuffling, sharding sampler used for training twice."""
    judged: set[int] = set()
    for loader in sorted(record.loaders, key=lambda entry: (entry.rank, entry.loader)):
        if loader.site in judged or not (loader.sampler_shards and loader.sampler_shuffles):
            continue
        verdict = _judge(record, loader)
        if verdict is not None:
            judged.add(loader.site)
            yield verdict


def _judge(record: RunRecord, loader: Loader) -> Epochs | None:
    passes = [
        entry
        for entry in record.passes
        if entry.rank == loader.rank and entry.loader == loader.loader and entry.backwards and entry.index_digest
    ]
    passes.sort(key=lambda entry: entry.ordinal)
    if len(passes) < 2 or (passes[0].index_count or 0) < 2:
        return None
    alike = _pair(passes)
    # A sampler's epoch is 0 until set_epoch is called.
    never_called = not any(entry.set_epoch for entry in passes)
    if alike is not None and never_called:
        first, second = alike
        count = first.index_count or 0
        return Epochs(
            repeated=True,
            sentence=f"rank {loader.rank} drew its {count:,} samples in the same order in {len(passes)} training "
            f"passes: set_epoch was never called on the {loader.sampler_type or 'sampler'}",
            location=site_location(record.site(loader.site)),
            samples=count,
            first_pass=first.ordinal,
            second_pass=second.ordinal,
            passes=len(passes),
        )
    if alike is None and not never_called:
        return Epochs(
            repeated=False,
            sentence=f"set_epoch was called and the order changed between {len(passes)} training passes",
            location=site_location(record.site(loader.site)),
            samples=passes[0].index_count or 0,
            first_pass=passes[0].ordinal,
            second_pass=passes[1].ordinal,
            passes=len(passes),
        )
    return None


def _pair(passes: list[Pass]) -> tuple[Pass, Pass] | None:
    seen: dict[str, Pass] = {}
    for entry in passes:
        if entry.index_digest in seen:
            return seen[entry.index_digest], entry
        seen[entry.index_digest] = entry
    return None
