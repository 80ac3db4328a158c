"""How far two clocks are apart, by what cannot have happened before its cause; and who is late by such clocks."""

from __future__ import annotations

import random

import msgspec
import pytest

from ddpdoctor.checks.speed import straggler
from ddpdoctor.diagnosis.clocks import Bound, ClockBounds, bounds_of_steps
from ddpdoctor.diagnosis.performance.summarise import summarise
from ddpdoctor.finding import Finding
from ddpdoctor.record.joining import Clock, Joiner, NodePart
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.setup import Node
from tests.diagnosis.measured_job import MeasuredJob

MS = 1_000_000
AHEAD_NS = 5_000 * MS
PHASES = {"data_wait": 1.0, "forward": 20.0, "backward": 40.0, "optimizer": 5.0, "other": 2.0}


def exchanged(
    seconds: int, *, there_ms: float, back_ms: float, ahead_ns: int = AHEAD_NS, drift: float = 0.0, seed: int = 0
) -> ClockBounds:
    """A message a second, there and back, with delays of so much and up to as much again."""
    draw, bounds = random.Random(seed), ClockBounds()
    for second in range(seconds):
        sent = 1_000_000 * MS + second * 1_000 * MS
        received = sent + int(there_ms * MS * (1 + draw.random()))
        heard = received + int(back_ms * MS * (1 + draw.random()))

        def own(moment: int) -> int:
            return moment + ahead_ns + int((moment - 1_000_000 * MS) * drift)

        bounds.add(Bound(own(heard), received - own(heard), received - own(sent)))
    return bounds


@pytest.mark.parametrize("there_ms", [0.1, 20.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_truth_is_within_the_bounds_also_where_one_way_is_slow(there_ms: float, seed: int) -> None:
    clock = exchanged(60, there_ms=there_ms, back_ms=0.1, seed=seed).clock()
    assert clock is not None and clock.error_ns is not None
    assert abs(clock.offset_ns + AHEAD_NS) <= clock.error_ns
    assert clock.error_ns < (there_ms + 0.2) * MS


@pytest.mark.parametrize("drift", [5e-5, -5e-5, 4e-4])
def test_a_clock_that_runs_fast_or_slow_is_followed(drift: float) -> None:
    seconds = 200
    clock = exchanged(seconds, there_ms=0.1, back_ms=0.1, drift=drift).clock()
    assert clock is not None and clock.error_ns is not None
    now = 1_000_000 * MS + seconds * 1_000 * MS
    own = now + AHEAD_NS + int(seconds * 1_000 * MS * drift)
    assert abs(clock.moved(own) - now) < 2 * MS
    assert clock.drift == pytest.approx(-drift, abs=2e-5)


def test_a_clock_that_was_set_meanwhile_is_believed_as_it_is_now() -> None:
    bounds = exchanged(30, there_ms=0.1, back_ms=0.1)
    for bound in exchanged(30, there_ms=0.1, back_ms=0.1, ahead_ns=0)._bounds:
        bounds.add(bound)
    clock = bounds.clock()
    assert clock is not None and clock.error_ns is not None
    assert abs(clock.offset_ns) <= clock.error_ns < MS


def test_nothing_is_known_without_an_exchange() -> None:
    assert ClockBounds().clock() is None


def job() -> MeasuredJob:
    """A job of four ranks that starts long after the clocks began."""
    measured = MeasuredJob(4)
    measured.pause(100_000)
    return measured


def halves(record: RunRecord, ahead_ns: int, error_ns: int | None) -> list[RunRecord | NodePart]:
    """The record of a job of two nodes as each has it; the clock of the second one is ahead."""
    found: list[RunRecord | NodePart] = []
    for number, ranks in enumerate(((0, 1), (2, 3))):
        part = msgspec.structs.replace(
            record,
            ranks=tuple(
                msgspec.structs.replace(rank, node=number, host=f"node{number}")
                for rank in record.ranks
                if rank.rank in ranks
            ),
            nodes=(Node(host=f"node{number}", ranks=ranks),),
            step_tracks=tuple(track for track in record.step_tracks if track.rank in ranks),
            call_tracks=tuple(track for track in record.call_tracks if track.rank in ranks),
        )
        if number:
            moved = NodePart(name="", record=part, clock=Clock(offset_ns=ahead_ns))
            part = Joiner().join([moved]) if ahead_ns else part
        clock = Clock(offset_ns=-ahead_ns if number else 0, error_ns=error_ns if number or error_ns is None else 0)
        found += [part, NodePart(name=str(number), record=part, clock=clock)]
    return found


def test_steps_that_both_nodes_made_bound_the_clock_by_themselves() -> None:
    measured = job()
    for late in (1, 3, 0, 2):
        measured.run(10, PHASES, {late: {"forward": 10.0}}, transfer=1.0)
    first, _, other, _ = halves(measured.record(), AHEAD_NS, None)
    assert isinstance(first, RunRecord) and isinstance(other, RunRecord)
    bounds = list(bounds_of_steps(first, other))
    low, high = max(bound.low_ns for bound in bounds), min(bound.high_ns for bound in bounds)
    assert low <= -AHEAD_NS <= high
    assert high - low <= 2 * MS
    known = exchanged(30, there_ms=20.0, back_ms=20.0).clock()
    narrowed = exchanged(30, there_ms=20.0, back_ms=20.0)
    clock = narrowed.clock([Bound(known.at_ns if known else 0, low, high)])
    assert clock is not None and clock.error_ns is not None and clock.error_ns <= MS + MS // 10
    assert abs(clock.offset_ns + AHEAD_NS) <= clock.error_ns


def named(record: RunRecord) -> list[str]:
    return [found.title for found in straggler.in_run(record) if isinstance(found, Finding)]


@pytest.mark.parametrize("ahead_ns", [0, AHEAD_NS, -AHEAD_NS])
def test_a_rank_is_late_only_beyond_what_the_clocks_can_tell(ahead_ns: int) -> None:
    record = job().run(60, PHASES, {3: {"forward": 20.0}}, transfer=4.0).record()
    known = [part for part in halves(record, ahead_ns, MS) if isinstance(part, NodePart)]
    (title,) = named(Joiner().join(known))
    assert title.startswith("rank 3 keeps the others waiting for ")
    even = job().run(60, PHASES, {2: {"forward": 20.0}, 3: {"forward": 20.0}}, transfer=4.0).record()
    vague = [part for part in halves(even, ahead_ns, 30 * MS) if isinstance(part, NodePart)]
    assert named(Joiner().join(vague)) == []
    sharp = [part for part in halves(even, ahead_ns, MS) if isinstance(part, NodePart)]
    assert named(Joiner().join(sharp))[0].startswith("ranks 2 and 3 keep the others waiting for ")


def test_who_is_late_on_his_own_node_is_told_however_vague_the_clocks() -> None:
    record = job().run(60, PHASES, {3: {"forward": 20.0}}, transfer=4.0).record()
    parts = [part for part in halves(record, AHEAD_NS, 50 * MS) if isinstance(part, NodePart)]
    joined = Joiner().join(parts)
    waiting = {rank.rank: rank.waiting_ns for rank in summarise(joined).ranks}
    assert waiting[2] == pytest.approx(20 * MS) and waiting[3] == pytest.approx(0)


def test_ranks_that_left_the_last_collective_later_on_a_slow_link_are_no_stragglers() -> None:
    measured = job()
    for _ in range(60):
        measured.run(1, PHASES, transfer=40.0)
        measured.pause(30.0, 0, 3)  # They have their results so much later, and begin the next step.
    parts = [part for part in halves(measured.record(), AHEAD_NS, 5 * MS) if isinstance(part, NodePart)]
    assert named(Joiner().join(parts)) == []
