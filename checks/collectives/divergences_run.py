"""How ranks of a run part, in batches, models or collectives, and how long they waited for others."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec

from ddpdoctor.check import Numbers, Reason, Verdict, Via
from ddpdoctor.diagnosis.divergence import long_waits as rehearsed
from ddpdoctor.diagnosis.divergence.divergence import find_divergence, root_exception
from ddpdoctor.diagnosis.performance.exposure import BARRIERS
from ddpdoctor.diagnosis.performance.stragglers import enough_steps
from ddpdoctor.diagnosis.performance.summary import threshold
from ddpdoctor.diagnosis.steps import RankSteps, measured_steps, once_per_record
from ddpdoctor.diagnosis.sync_points import GRADIENTS, gradient_meetings, lane, replica_sets
from ddpdoctor.diagnosis.training.pass_lengths import LoaderOnRanks, feeds_ddp, loaders_on_all_ranks
from ddpdoctor.diagnosis.wording import (
    bytes_text,
    count,
    duration_text,
    group_name,
    location_of,
    milliseconds_text,
    place,
    rank_list,
    site_location,
    verb,
)
from ddpdoctor.files import regex
from ddpdoctor.finding import Confirmed, Fact, Frame, Location, Refuted, Severity, grouped
from ddpdoctor.record.joining import headline
from ddpdoctor.record.model import RankException, RunRecord, Site
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
    loaders = loaders_on_all_ranks(record)
    feeding = [loader for loader in loaders if any(feeds_ddp(record, one) for one in loader.loaders)]
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
            on_it = f"the shape [{found[2]}] on rank {rank.rank} and a different one on rank 0"
            said[rank.rank] = f"parameter {found[1]} has {on_it}"
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
    timeout_ns = record.groups[0].timeout_ns if record.groups else 0
    if limit := _LIMIT.search(raised.message):
        timeout_ns = int(next(filter(None, limit.groups()))) * 1_000_000
    elif call is not None:
        timeout_ns = record.groups[call[0].group[call[1]]].timeout_ns
    numbers = {"timeout_s": timeout_ns / 1e9} | ({} if sequence is None else {"sequence": sequence})
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


# How long ranks of a live run waited for others: in collectives, backward, barriers, and calls that still last.

# Where a rank may be waiting for others.
_SHARED_PHASES = frozenset({"explicit", "backward"})


class LiveWait(msgspec.Struct, frozen=True, kw_only=True):
    """One wait of some ranks of a group for others."""

    group: int
    """Index into ``RunRecord.groups``."""
    kind: str
    """The collective as users spell it, or ``gradients``."""
    waiting: tuple[int, ...]
    late: tuple[int, ...]
    """Those that came last, or have not come yet."""
    waited_ns: int
    """By the rank that came first."""
    lasts: bool = False
    site: Site = Site()
    """Where the ranks wait, if it is known."""
    late_phase: str = ""
    """What the late rank does now, of a wait that lasts."""
    late_site: Site = Site()
    """Where it does it, if it is known."""


@once_per_record()
def longest_waits(record: RunRecord) -> tuple[LiveWait, ...]:
    """Return the longest wait of each group; none for groups whose ranks are not all observed."""
    longest: dict[int, LiveWait] = {}
    for wait in (*_in_calls(record), *_in_gradients(record), *_in_backward_now(record)):
        known = longest.get(wait.group)
        if known is None or wait.waited_ns > known.waited_ns:
            longest[wait.group] = wait
    return tuple(longest[group] for group in sorted(longest))


def long_waits(record: RunRecord) -> Iterator[Verdict]:
    """Yield the wait of a rehearsal that came nearest to its timeout, or went beyond it; of a live run the longest of
    each group, where it came near, and those that another group would not have survived.
    """
    if record.job.kind != "run":
        seen = rehearsed.longest_wait(record)
        if seen is not None:
            places = (location_of(seen.turn.line), None if seen.before is None else location_of(seen.before.line))
            worst = Severity.ERROR if seen.timed_out else None
            yield _timed(rehearsed.wait_text(seen), places, seen.late, seen.waited_ns, seen.timeout_ns, worst)
        return
    share = threshold(record, "long-wait")
    for wait in longest_waits(record):
        timeout_ns = record.groups[wait.group].timeout_ns
        if timeout_ns and wait.waited_ns >= share * timeout_ns:
            title = f"{_wait_text(wait)}; the timeout is {duration_text(timeout_ns)}"
            places = (site_location(wait.site), site_location(wait.late_site))
            yield _timed(title, places, wait.late, wait.waited_ns, timeout_ns)
    yield from _unfit_timeouts(record)


def _timed(
    sentence: str,
    places: tuple[Location | None, ...],
    late: tuple[int, ...],
    waited_ns: int,
    timeout_ns: int,
    severity: Severity | None = None,
) -> Verdict:
    numbers = {"waited_s": waited_ns / 1e9, "timeout_s": timeout_ns / 1e9}
    because = (f"the timeout of the group is {duration_text(timeout_ns)}", places[0], numbers)
    return Verdict(sentence=sentence, locations=places, ranks=late, because=because, severity=severity)


def _unfit_timeouts(record: RunRecord) -> Iterator[Verdict]:
    """Yield waits that ended well and were longer than another group of the late rank may wait."""
    for wait in longest_waits(record):
        own = record.groups[wait.group]
        for other in record.groups:
            shorter = 0 < other.timeout_ns < min(wait.waited_ns, own.timeout_ns or wait.waited_ns)
            if shorter and not wait.lasts and set(wait.late) < set(other.ranks):
                place, name = site_location(wait.site), group_name(other, record.job.world_size)
                waited, timeout = duration_text(wait.waited_ns), duration_text(other.timeout_ns)
                numbers = {"waited_s": wait.waited_ns / 1e9, "timeout_s": other.timeout_ns / 1e9}
                yield Verdict(
                    sentence=f"{_wait_text(wait)}, and {name} would have timed out after {timeout}",
                    remedy=f"Give {name} a timeout well above {waited}.",
                    severity=Severity.ADVICE,
                    locations=place,
                    ranks=wait.late,
                    because=(f"the longest wait was {waited}", place, numbers),
                )


def _wait_text(wait: LiveWait) -> str:
    """Say who waits or waited how long for whom."""
    done = verb(wait.waiting, "has waited", "have waited") if wait.lasts else "waited"
    what = "backward" if wait.kind == GRADIENTS else wait.kind
    at = f" at {place(wait.site.innermost)}" if wait.site.frames else ""
    doing = f" in {wait.late_phase.replace('_', ' ')}" if wait.late_phase not in ("", "other") else ""
    doing += f" at {place(wait.late_site.innermost)}" if wait.late_site.frames else ""
    busy = f", busy{doing}" if wait.lasts and doing else ""
    waited = duration_text(wait.waited_ns)
    return f"{rank_list(wait.waiting)} {done} {waited} in {what}{at} for {rank_list(wait.late)}{busy}"


def _in_calls(record: RunRecord) -> Iterator[LiveWait]:
    """Yield the longest wait in the explicit collectives of each group, and those that last."""
    tracks = {track.rank: track for track in record.call_tracks}
    for number, group in enumerate(record.groups):
        if len(group.ranks) < 2 or any(rank not in tracks for rank in group.ranks):
            continue
        members = [tracks[rank] for rank in group.ranks]
        lanes = [lane(track, number) for track in members]
        best_ns, best = 0, None
        for at in set(lanes[0]).intersection(*lanes[1:]):
            entered = [track.entered_at_ns[rows[at]] for track, rows in zip(members, lanes, strict=True)]
            left = [track.left_at_ns[rows[at]] for track, rows in zip(members, lanes, strict=True)]
            first = entered.index(min(entered))
            # Where a rank did not wait for the last, as the root of a broadcast, it was gone before that came.
            waited_ns = min(max(entered), left[first] or record.job.ended_ns) - entered[first]
            if waited_ns > best_ns:
                late = group.ranks[entered.index(max(entered))]
                best_ns, best = waited_ns, (members[first], lanes[first][at], late)
        if best is not None:
            track, row, late = best
            yield LiveWait(
                group=number,
                kind=track.kinds[track.kind[row]],
                waiting=tuple(rank for rank in group.ranks if rank != late),
                late=(late,),
                waited_ns=best_ns,
                site=record.site(track.site[row]),
            )
        yield from _open_calls(record, number, list(zip(members, lanes, strict=True)))


def _open_calls(
    record: RunRecord, number: int, members: list[tuple[CallTrack, dict[tuple[bool, int], int]]]
) -> Iterator[LiveWait]:
    rows_of = ((track, at, row) for track, rows in members for at, row in rows.items())
    open_at = {at: (track, row) for track, at, row in rows_of if not track.left_at_ns[row]}
    for at, (track, row) in open_at.items():
        came = [(member.entered_at_ns[rows[at]], member.rank) for member, rows in members if at in rows]
        late = [member.rank for member, rows in members if at not in rows]
        if late:
            kind, waiting = track.kinds[track.kind[row]], [rank for _, rank in came]
            yield _lasting(record, number, kind, waiting, late, min(came)[0], record.site(track.site[row]))


def _in_gradients(record: RunRecord) -> Iterator[LiveWait]:
    """Yield the longest wait in a backward, for each set of ranks that average gradients."""
    for meeting in gradient_meetings(record):
        if meeting.ranks != meeting.members:
            continue
        group = _group_of(record, meeting.ranks)
        waits = meeting.waiting_ns
        longest = max(range(len(meeting.step)), key=lambda at: max(column[at] for column in waits))
        waited_ns = max(column[longest] for column in waits)
        arrived = [column[longest] for column in meeting.arrived_ns]
        late = meeting.ranks[arrived.index(max(arrived))]
        if group is not None and waited_ns:
            yield LiveWait(
                group=group,
                kind=GRADIENTS,
                waiting=tuple(rank for rank in meeting.ranks if rank != late),
                late=(late,),
                waited_ns=waited_ns,
            )


def _in_backward_now(record: RunRecord) -> Iterator[LiveWait]:
    """Ranks that are in backward while others of the job are elsewhere; at most so long, for they compute there too."""
    group = _group_of(record, tuple(sorted(beat.rank for beat in record.heartbeats)))
    inside = [beat for beat in record.heartbeats if beat.phase == "backward"]
    late = [beat.rank for beat in record.heartbeats if beat.phase not in (*_SHARED_PHASES, "finished")]
    if group is None or not inside or not late or len(inside) + len(late) != len(record.heartbeats):
        return
    since_ns = max(beat.phase_since_ns for beat in inside)
    yield _lasting(record, group, GRADIENTS, [beat.rank for beat in inside], late, since_ns, Site())


def _lasting(
    record: RunRecord,
    group: int,
    kind: str,
    waiting: list[int],
    late: list[int],
    since_ns: int,
    site: Site,
) -> LiveWait:
    busy = record.heartbeat(late[0])
    return LiveWait(
        group=group,
        kind=kind,
        waiting=tuple(sorted(waiting)),
        late=tuple(sorted(late)),
        waited_ns=record.job.ended_ns - since_ns,
        lasts=True,
        site=site,
        late_phase="" if busy is None else busy.phase,
        late_site=Site() if busy is None else record.site(busy.site),
    )


def _group_of(record: RunRecord, ranks: tuple[int, ...]) -> int | None:
    return next((number for number, group in enumerate(record.groups) if group.ranks == ranks), None)


# Barriers and reductions that cost much of a step.

FEWEST_STEPS = 4
"""Steps of one loop that must be seen before "every step" is said."""
NEARLY_ALL = 0.9
"""Share of the steps of a live run: the last of a pass may lack the barrier."""
_REDUCE_RARELY = (
    "The line reduces a number, and the barrier comes with it: reduce it once an epoch, as "
    "self.log(..., on_step=False, on_epoch=True, sync_dist=True) does, or only in steps that log it."
)


def _barrier(kind: str, site: Site, told: str, numbers: Numbers, **mild: Any) -> Verdict:
    location = site_location(site)
    return Verdict(
        sentence=f"every training step waits in {kind}{told}, although backward already synchronises the ranks",
        locations=location,
        because=(f"each rank called it {numbers['calls']:,} times", Via(location, site.frames), numbers),
        **mild,
    )


def hot_barriers(record: RunRecord) -> Iterator[Verdict]:
    """Yield the barriers that follow every training forward of a loop, on every rank.

    A pass counts when it had four steps or more, so that a barrier at the end of each short pass is none in every step;
    the last step of a pass may lack it.
    """
    ranks = record.rank_numbers()
    per_rank = [_of_rank(record, rank) for rank in ranks]
    track = record.track(ranks[0]) if ranks else None
    made = [] if track is None else zip(track.site, track.signature, strict=True)
    reducing = {site for site, signature in made if record.signatures[signature].kind in _REDUCTIONS}
    for number in per_rank[0] if per_rank else ():
        if all(number in found for found in per_rank):
            (calls, steps, kind), site = per_rank[0][number], record.site(number)
            told = f" at {place(site.innermost)}: {count(calls, 'call')} in {count(steps, 'step')} of each rank"
            # The same line reduces as well, as a framework's log does: the barrier is not the user's own.
            mild = {"severity": Severity.ADVICE, "remedy": _REDUCE_RARELY} if number in reducing else {}
            yield _barrier(kind, site, told, {"calls": calls, "steps": steps}, **mild)


def live_barriers(record: RunRecord) -> Iterator[Verdict]:
    """Yield the barriers that nearly every measured step ran, on every rank, and what they cost a step.

    Where nearly all of that is waiting for the last rank, which would only wait elsewhere, it is advice.

    Raises TooLittleEvidence where too few steps were measured.
    """
    summary = enough_steps(record)
    tracks = {track.rank: track for track in record.call_tracks}
    ranks = [steps for steps in measured_steps(record) if steps.rank in tracks]
    per_rank = [_calls_by_place(tracks[steps.rank], steps) for steps in ranks]
    for (kind, site), calls in per_rank[0].items() if per_rank else ():
        often = all(
            len(set(found.get((kind, site), ()))) >= NEARLY_ALL * len(steps)
            for found, steps in zip(per_rank, ranks, strict=True)
        )
        costs = [entry for entry in summary.traffic if entry.kind == kind]
        if not often or not costs or summary.phases is None:
            continue
        share = len(calls) / len(ranks[0]) / sum(entry.calls_per_step for entry in costs)
        blocked_ns = share * sum(entry.ns_per_step or 0.0 for entry in costs)
        waiting_ns = share * sum(entry.waiting_ns_per_step or 0.0 for entry in costs)
        limit_ns = threshold(record, "barrier-in-hot-loop") * summary.phases.step_ns
        at = f" at {place(record.site(site).innermost)}" if record.site(site).frames else ""
        waiting = f", {milliseconds_text(waiting_ns)} of it waiting for the last rank" if waiting_ns else ""
        told = f"{at} ({milliseconds_text(blocked_ns)}{waiting})"
        numbers = {"calls": len(calls), "steps": len(ranks[0]), "blocked_ns_per_step": blocked_ns}
        severity = None if blocked_ns - waiting_ns > limit_ns else Severity.ADVICE
        yield _barrier(kind, record.site(site), told, numbers, severity=severity)


def _calls_by_place(track: CallTrack, steps: RankSteps) -> dict[tuple[str, int], list[int]]:
    """By kind and call chain of a barrier, the steps that count in which it was called, once a call."""
    counted, found = set(steps.step), dict[tuple[str, int], list[int]]()
    for row in range(len(track)):
        kind = track.kinds[track.kind[row]]
        if kind in BARRIERS and track.step[row] in counted:
            found.setdefault((kind, track.site[row]), []).append(track.step[row])
    return found


def _of_rank(record: RunRecord, rank: int) -> dict[int, tuple[int, int, str]]:
    """Calls, steps and kind of each call chain that runs a barrier in every step of a rank."""
    track = record.track(rank)
    if track is None:
        return {}
    trained = (one for one in record.forwards if one.rank == rank and one.step > 0 and one.wrapped)
    by_loop = grouped(trained, lambda one: (one.site, one.pass_loader, one.pass_ordinal))
    loops = {loop: [one.step for one in found] for loop, found in by_loop.items() if len(found) >= FEWEST_STEPS}
    seen: dict[int, set[tuple[int, int]]] = {}
    kinds: dict[int, str] = {}
    calls: dict[int, int] = {}
    for row in range(len(track)):
        signature, site = record.signatures[track.signature[row]], track.site[row]
        if signature.kind in BARRIERS and signature.origin == "user" and site >= 0:
            seen.setdefault(site, set()).add((track.forward_site[row], track.step[row]))
            kinds[site] = signature.kind
            calls[site] = calls.get(site, 0) + 1
    return {
        site: (calls[site], sum(map(len, loops.values())), kinds[site])
        for site, at in seen.items()
        if loops and all((forward, step) in at for (forward, _, _), steps in loops.items() for step in steps[:-1])
    }


_REDUCTIONS = frozenset({"all_reduce", "reduce"})
RARELY = 0.5
"""Share of the steps up to which it is not run in every step, whatever the source looks like."""


class _Counted(msgspec.Struct, frozen=True, kw_only=True):
    """How often a rank ran a line after the backwards of one call chain: a step may have several forwards."""

    calls: int
    ran: int
    """Backwards that it followed."""
    steps: int
    """All of them."""
    size_bytes: int
    """Of the largest call."""


def counted_reductions(record: RunRecord) -> Iterator[Confirmed | Refuted]:
    """Say of each line that reduced during training on every rank whether it did so in every step.

    The rank that ran it least counts. The first step or the last may lack it. Where it ran in most steps, but not in
    all, nothing is said.
    """
    per_rank = [_reductions_of(record, rank) for rank in record.rank_numbers()]
    for frame in per_rank[0] if per_rank else ():
        location = location_of(frame)
        if location is None or not all(frame in found for found in per_rank):
            continue
        least = min((found[frame] for found in per_rank), key=lambda counted: counted.ran)
        told = f"{least.ran:,} of {count(least.steps, 'training step')}"
        if least.ran >= least.steps - 1:
            times = f"{count(least.calls, 'time')}, {bytes_text(least.size_bytes)} each"
            fact = Fact(
                text=f"each rank ran it in {told} ({times})",
                basis=record.job.kind,
                numbers={"calls": least.calls, "steps": least.steps, "bytes_per_call": least.size_bytes},
            )
            yield Confirmed(location=location, fact=fact)
        elif least.ran <= RARELY * least.steps:
            yield Refuted(location=location, reason=f"it ran in {told}")


def _reductions_of(record: RunRecord, rank: int) -> dict[Frame, _Counted]:
    track = record.track(rank)
    if track is None:
        return {}
    backwards = sorted((entry.time_ns, entry.site) for entry in record.backwards if entry.rank == rank)
    times_ns = [time_ns for time_ns, _ in backwards]
    rows: dict[tuple[Frame, int], list[tuple[int, int]]] = {}
    for row in range(len(track)):
        signature, frame = record.signatures[track.signature[row]], record.site(track.site[row]).innermost
        newest = bisect_right(times_ns, track.started_ns[row]) - 1
        if signature.kind in _REDUCTIONS and signature.origin == "user" and frame is not None and newest >= 0:
            rows.setdefault((frame, backwards[newest][1]), []).append((newest, signature.size_bytes))
    found: dict[Frame, _Counted] = {}
    made = Counter(site for _, site in backwards)
    for (frame, site), own in rows.items():
        ran = len({backward for backward, _ in own})
        counted = _Counted(calls=len(own), ran=ran, steps=made[site], size_bytes=max(size for _, size in own))
        known = found.get(frame)
        # Of several loops that reach a line the one that does so most often.
        if made[site] >= FEWEST_STEPS and (known is None or ran / made[site] > known.ran / known.steps):
            found[frame] = counted
    return found
