"""How ranks of a run part: they draw more batches than others, call different collectives, or give one up."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from ddpdoctor.check import Reason, Verdict
from ddpdoctor.diagnosis.divergence.divergence import find_divergence, root_exception
from ddpdoctor.diagnosis.sync_points import GRADIENTS, lane, replica_sets
from ddpdoctor.diagnosis.training.pass_lengths import LoaderOnRanks, feeds_ddp, loaders_on_all_ranks
from ddpdoctor.diagnosis.wording import count, duration_text, location_of, place, rank_list, site_location
from ddpdoctor.files import regex
from ddpdoctor.finding import Location, Severity
from ddpdoctor.record.joining import headline
from ddpdoctor.record.model import RankException, RunRecord
from ddpdoctor.record.streams.measured import CallTrack, StepTrack

LASTING_STEPS = 10
"""A lead that has lasted for so many steps stays: ranks that leave a batch out in turns do so within a few."""
USUAL_SHARE = 0.8
"""So many steps draw the usual number of batches; where they do not there is no usual one."""


def batches_ahead(record: RunRecord) -> Iterator[Verdict]:
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


def _of_set(tracks: list[StepTrack], location: Location | None) -> Iterator[Verdict]:
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
        rank, own = tracks[at].rank, count(drawn[at][step], "batch", "batches")
        more = f"rank {rank} has drawn {count(lead, 'batch', 'batches')} more than the others in as many steps"
        yield Verdict(
            sentence=f"rank {rank} drew {own} for step {step:,}, the others {usual:,}: from there on it trains on "
            "different batches than the others, and it will be a step short at the end unless they skip as many",
            locations=location,
            ranks=(rank,),
            because=(more, location, {"batches": lead, "step": step}, rank),
            severity=Severity.WARNING,
        )


# Ranks that build different models, as DDP's constructor tells it.

# What DDP's constructor says when it compares the models: the ranks have different numbers of parameters …
_COUNTS = regex(
    r"expects same model across all ranks.*?rank (\d+) has (\d+) params.*?inconsistent (\d+) params", re.IGNORECASE
)
# … or a parameter of another shape.
_SIZES = regex(r"params\[(\d+)\] in this process with sizes \[([\d, ]*)\] appears not to match sizes")
MOST_PARAMETERS = 1_000_000
"""Counts beyond are what a rank read of another collective, no number of parameters."""


def find_model_mismatch(record: RunRecord) -> Verdict | None:
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
    return Verdict(
        sentence=f"the ranks build DDP from different models: {told}",
        locations=location,
        ranks=tuple(sorted(said)),
        because=(f"message of DDP's constructor: {message}", None),
    )


# The collective that timed out, and the ranks that did not reach it.

# The watchdog of NCCL, a wait of gloo, and monitored_barrier each have words of their own.
_TIMED_OUT = regex(
    r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for|failed to pass monitoredBarrier"
    r"|ran for \d+ milliseconds before timing out",
    re.IGNORECASE,
)
# NCCL's watchdog prints the work: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, …).
_NCCL = regex(r"SeqNum=(?P<sequence>\d+), OpType=(?P<kind>\w+)")
_LIMIT = regex(r"Timeout\(ms\)=(\d+)|Timed out waiting (\d+)ms|in (\d+) ?ms")
_MONITORED = regex(r"Rank (\d+) failed to pass monitoredBarrier", re.IGNORECASE)


def timed_out(record: RunRecord) -> Iterator[Verdict]:
    """Yield the timeout that brought the job down, unless the ranks' collectives name the cause."""
    struck = sorted(
        (raised.time_ns, rank.rank, raised)
        for rank in record.ranks
        for raised in rank.exceptions
        if _TIMED_OUT.search(raised.message) and raised == min(rank.exceptions, key=lambda entry: entry.time_ns)
    )
    if not struck or find_divergence(record) is not None:
        return
    _, first, raised = struck[0]
    ranks = tuple(sorted({rank for _, rank, _ in struck}))
    said = _NCCL.search(raised.message)
    call = _last_call(record, first)
    absent, agreed = _absent(record, ranks, call, raised)
    kind = said["kind"].lower() if said else ""
    sequence = int(said["sequence"]) if said else None
    frame = raised.frames[0] if raised.frames else None
    if call is not None and not said:
        track, row = call
        kind, sequence = track.kinds[track.kind[row]], track.sequence[row]
        frame = record.site(track.site[row]).innermost or frame
    elif not said and any(heartbeat.rank == first and heartbeat.phase == "backward" for heartbeat in record.heartbeats):
        kind = GRADIENTS
    timeout_ns = _limit_ns(record, raised, call)
    numbers: dict[str, int | float] = {"timeout_s": timeout_ns / 1e9}
    if sequence is not None:
        numbers["sequence"] = sequence
    because: list[Reason] = [(f"rank {ranks[0]}: {headline(raised)[:240]}", None, numbers)]
    if agreed is not None:
        text = f"the last collective that all ranks reached is number {agreed:,}"
        because.append((text, None, {"sequence": agreed}))
    what = {"": "a collective", GRADIENTS: "the reduction of gradients"}.get(kind, kind)
    number = f" #{sequence:,}" if sequence is not None else ""
    at = f" at {place(frame)}" if frame is not None else ""
    after = f" after {duration_text(timeout_ns)}" if timeout_ns else ""
    missing = f": {rank_list(absent)} did not arrive" if absent else ""
    yield Verdict(
        sentence=f"{rank_list(ranks)} timed out in {what}{number}{at}{after}{missing}",
        remedy=f"Look at what {rank_list(absent)} did meanwhile: divide that work, or give the group a timeout that "
        "covers it."
        if absent
        else "Compare the ranks' last lines and stacks; if all of them wait in this collective, look at the network.",
        locations=location_of(frame),
        ranks=absent,
        because=tuple(because),
    )


def _last_call(record: RunRecord, rank: int) -> tuple[CallTrack, int] | None:
    """Return the explicit collective that a rank was in when it failed."""
    track = next((track for track in record.call_tracks if track.rank == rank), None)
    if track is None or not len(track):
        return None
    row = len(track) - 1
    failed_ns = min(raised.time_ns for entry in record.ranks if entry.rank == rank for raised in entry.exceptions)
    left_ns = track.left_at_ns[row]
    # The exception left the call a moment before it was seen at the top.
    return (track, row) if track.sequence[row] >= 0 and (not left_ns or 0 <= failed_ns - left_ns < _MOMENT_NS) else None


_MOMENT_NS = 500_000_000


def _absent(
    record: RunRecord, ranks: Sequence[int], call: tuple[CallTrack, int] | None, raised: RankException
) -> tuple[tuple[int, ...], int | None]:
    """Return the ranks that did not come, and the last number that all came to."""
    monitored = _MONITORED.search(raised.message)
    if monitored:
        return (int(monitored[1]),), None
    if call is not None:
        track, row = call
        group, sequence = track.group[row], track.sequence[row]
        members = [other for other in record.call_tracks if other.rank in record.groups[group].ranks]
        place = next(at for at, own in lane(track, group).items() if own == row)
        absent = tuple(sorted(other.rank for other in members if place not in lane(other, group)))
        return absent, sequence - 1 if absent and sequence else None
    enqueued = {heartbeat.rank: heartbeat.enqueued for heartbeat in record.heartbeats if heartbeat.enqueued >= 0}
    most = max((enqueued[rank] for rank in ranks if rank in enqueued), default=-1)
    behind = tuple(sorted(rank for rank, number in enqueued.items() if number < most))
    if behind:
        return behind, min(enqueued[rank] for rank in behind)
    silent = tuple(rank.rank for rank in record.ranks if rank.rank not in ranks and not rank.exceptions)
    return (silent if len(silent) < len(record.ranks) / 2 else ()), None


def _limit_ns(record: RunRecord, raised: RankException, call: tuple[CallTrack, int] | None) -> int:
    match = _LIMIT.search(raised.message)
    if match:
        return int(next(filter(None, match.groups()))) * 1_000_000
    if call is not None:
        return record.groups[call[0].group[call[1]]].timeout_ns
    return record.groups[0].timeout_ns if record.groups else 0
