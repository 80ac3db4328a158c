"""Lines that run many small collectives a step, in a rehearsal or a live run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import msgspec

from ddpdoctor.check import Verdict, Via
from ddpdoctor.diagnosis.performance.stragglers import enough_steps
from ddpdoctor.diagnosis.performance.summary import threshold
from ddpdoctor.diagnosis.steps import RankSteps, measured_steps
from ddpdoctor.diagnosis.wording import bytes_text, count, milliseconds_text, place, site_location
from ddpdoctor.finding import Severity
from ddpdoctor.record.model import RunRecord, Site
from ddpdoctor.record.streams.measured import CallTrack

FEWEST_CALLS = 8
"""Of one line in a step, from which on they are many."""
SMALL_BYTES = 1 << 20
"""In a call: what more than that takes is the transfer and not the latency."""
FEWEST_STEPS = 3
NEARLY_ALL = 0.8
"""Share of the steps in which a line runs that runs in every step."""
_KINDS = frozenset({"all_reduce", "reduce", "broadcast"})


class _Line(msgspec.Struct, kw_only=True):
    """What a rank ran from one call chain."""

    kind: str
    of: int
    """Steps of which it is known."""
    calls: int = 0
    size_bytes: int = 0
    blocked_ns: int = 0
    steps: set[int] = msgspec.field(default_factory=set)
    turns: set[tuple[int, str]] = msgspec.field(default_factory=set)
    """Step and subject: what each turn of a loop around it was about, where it has one."""

    @property
    def calls_per_step(self) -> float:
        return self.calls / len(self.steps)

    @property
    def is_of_every_step(self) -> bool:
        return self.of >= FEWEST_STEPS and len(self.steps) >= NEARLY_ALL * (self.of - 1)


def rehearsed_lines(record: RunRecord) -> Iterator[Verdict]:
    """Yield what the training steps of a rehearsal run from one line, on the rank that runs the fewest."""
    per_rank = [_rehearsed(record, rank) for rank in record.rank_numbers()]
    for site in per_rank[0] if per_rank else ():
        if all(site in lines and lines[site].is_of_every_step for lines in per_rank):
            line = min((lines[site] for lines in per_rank), key=lambda found: found.calls_per_step)
            # What an operation of torch runs inside has no loop of the script around it.
            looped = len(line.turns) >= FEWEST_CALLS * len(line.steps) / 2
            yield from _judged(record.site(site), line, looped=looped)


def _rehearsed(record: RunRecord, rank: int) -> dict[int, _Line]:
    """Return what a rank ran after its backwards, by the call chain."""
    times_ns = sorted(entry.time_ns for entry in record.backwards if entry.rank == rank)
    track, lines = record.track(rank), dict[int, _Line]()
    rows = () if track is None else zip(track.site, track.signature, track.started_ns, strict=True)
    for site, number, started_ns in rows:
        signature, step = record.signatures[number], bisect_right(times_ns, started_ns)
        if signature.kind not in _KINDS or signature.origin != "user" or not step or site < 0:
            continue
        line = lines.setdefault(site, _Line(kind=signature.kind, of=len(times_ns)))
        line.calls += 1
        line.size_bytes += signature.size_bytes
        line.steps.add(step)
        if signature.subject:
            line.turns.add((step, signature.subject))
    return lines


def live_lines(record: RunRecord) -> Iterator[Verdict]:
    """Yield what nearly every measured step of a live run runs from one line, with what it costs.

    That is what it took on the rank that it took least, which waited least for the others. Raises TooLittleEvidence
    where too few steps were measured.
    """
    summary = enough_steps(record)
    if summary.phases is None:
        return
    tracks = {track.rank: track for track in record.call_tracks}
    per_rank = [_live(tracks[steps.rank], steps) for steps in measured_steps(record) if steps.rank in tracks]
    for site, line in per_rank[0].items() if per_rank else ():
        if all(site in lines and lines[site].is_of_every_step for lines in per_rank):
            blocked_ns = min(lines[site].blocked_ns / len(lines[site].steps) for lines in per_rank)
            of_step = blocked_ns / summary.phases.step_ns
            limit = threshold(record, "many-small-collectives")
            yield from _judged(record.site(site), line, blocked_ns=blocked_ns, of_step=of_step, limit=limit)


def _live(track: CallTrack, steps: RankSteps) -> dict[int, _Line]:
    counted, lines = set(steps.step), dict[int, _Line]()
    # The ring holds the newest calls only, and of the oldest step maybe a part.
    known = sorted(counted.intersection(track.step))[1:]
    for row in range(len(track)):
        kind, site, step = track.kinds[track.kind[row]], track.site[row], track.step[row]
        if kind in _KINDS and site >= 0 and known and step >= known[0] and step in counted and track.left_at_ns[row]:
            line = lines.setdefault(site, _Line(kind=kind, of=len(known)))
            line.calls += 1
            line.size_bytes += track.size_bytes[row]
            line.blocked_ns += track.left_at_ns[row] - track.entered_at_ns[row]
            line.steps.add(step)
    return lines


def _judged(
    site: Site, line: _Line, *, looped: bool = True, blocked_ns: float = 0.0, of_step: float = 0.0, limit: float = 1.0
) -> Iterator[Verdict]:
    location, each = site_location(site), line.size_bytes // line.calls
    calls = round(line.calls_per_step)
    carried = f"{bytes_text(each)} each"
    if calls < FEWEST_CALLS or each >= SMALL_BYTES:
        yield Verdict(wrong=False, sentence=f"it runs {count(calls, 'time')} a step, {carried}", locations=location)
    elif looped:
        cost = f", which take {milliseconds_text(blocked_ns)} of the step ({of_step:.0%})" if blocked_ns else ""
        numbers = {
            "calls": line.calls,
            "steps": len(line.steps),
            "bytes_per_call": each,
            "blocked_ns_per_step": blocked_ns,
        }
        yield Verdict(
            sentence=f"every training step runs {calls} small collectives one after the other at "
            f"{place(site.innermost)}, {carried}{cost}",
            locations=location,
            severity=Severity.WARNING if of_step >= limit else None,
            because=(
                f"each rank ran {line.kind} {line.calls:,} times in {count(len(line.steps), 'step')}",
                Via(location, site.frames),
                numbers,
            ),
        )
