"""Ranks of a live run that have drawn more batches than the others for as many steps, while the job continues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

import msgspec

from ddpdoctor.diagnosis.sync_points import replica_sets
from ddpdoctor.diagnosis.training.pass_lengths import LoaderOnRanks, feeds_ddp, loaders_on_all_ranks
from ddpdoctor.diagnosis.wording import count, site_location
from ddpdoctor.finding import Location
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.measured import StepTrack

LASTING_STEPS = 10
"""A lead that has lasted for so many steps stays: ranks that leave a batch out in turns do so within a few."""
USUAL_SHARE = 0.8
"""So many steps draw the usual number of batches; where they do not there is no usual one."""


class Ahead(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that has passed over batches that the others trained on."""

    rank: int
    lead: int
    """Batches that it has drawn more than the others."""
    step: int
    """The first step for which it drew more than usual."""
    drawn: int
    """Batches that it drew for that step."""
    usual: int
    location: Location | None
    """The line that goes through the loader."""

    @property
    def sentence(self) -> str:
        """Who drew how many, in words."""
        return (
            f"rank {self.rank} drew {count(self.drawn, 'batch', 'batches')} for step {self.step:,}, the others "
            f"{self.usual:,}"
        )


def batches_ahead(record: RunRecord) -> Iterator[Ahead]:
    """Yield the ranks that are ahead of all others they average with, which keep together.

    Only of loops over one loader of one length on all ranks, by a ``for`` statement and outside of ``join()``: a loop
    that draws with ``next``, or a rank that looks at some batch for itself, may draw as it likes.
    """
    feeding = [
        loader for loader in loaders_on_all_ranks(record) if any(feeds_ddp(record, one) for one in loader.loaders)
    ]
    if len(feeding) != 1 or not _keeps_together(feeding[0]):
        return
    site = next((entry.site for entries in feeding[0].passes for entry in entries), -1)
    location = site_location(record.site(site)) or feeding[0].location
    tracks = {track.rank: track for track in record.step_tracks}
    for members in replica_sets(record):
        if len(members) > 1 and all(rank in tracks for rank in members):
            yield from _of_set([tracks[rank] for rank in members], location)


def _keeps_together(loader: LoaderOnRanks) -> bool:
    """Return whether every rank goes through the loader by the same passes, in a ``for`` statement."""
    lengths = {entry.true_length for entries in loader.passes for entry in entries}
    counts = sorted(len(entries) for entries in loader.passes)
    if not counts or not counts[0] or counts[-1] - counts[0] > 1 or len(lengths) != 1 or None in lengths:
        return False
    first = [entries[0] for entries in loader.passes]
    return all(entry.looped for entry in first) and not any(entry.joined for entry in chain(*loader.passes))


def _of_set(tracks: list[StepTrack], location: Location | None) -> Iterator[Ahead]:
    """Yield the one rank of a set that has drawn more for the steps that all have made, if there is one."""
    drawn = [dict(zip(track.step, track.batches, strict=True)) for track in tracks]
    common = sorted(set(drawn[0]).intersection(*drawn[1:]))
    if len(common) <= LASTING_STEPS or common[-1] - common[0] != len(common) - 1:
        return
    kept = common[:-LASTING_STEPS]
    usual, times = Counter(batches[step] for batches in drawn for step in common).most_common(1)[0]
    if times < USUAL_SHARE * len(common) * len(drawn):
        return
    sums = [[sum(batches[step] for step in steps) for batches in drawn] for steps in (kept, common)]
    most = max(sums[1])
    leads = [most - total for total in sums[1]]
    if leads.count(0) != 1 or len({lead for lead in leads if lead}) != 1 or not usual:
        return
    at = leads.index(0)
    lead = most - min(sums[1])
    if sums[0][at] - min(sums[0]) != lead:
        return  # It has just become so.
    step = next((step for step in kept if drawn[at][step] > usual), None)
    if step is not None:
        yield Ahead(rank=tracks[at].rank, lead=lead, step=step, drawn=drawn[at][step], usual=usual, location=location)
