from __future__ import annotations

from array import array

import msgspec
import pytest

from ddpdoctor.diagnosis.performance.summarise import summarise
from ddpdoctor.diagnosis.performance.summary import Phases, RunSummary
from ddpdoctor.diagnosis.steps import recent
from ddpdoctor.record.model import Rank, Wrap
from ddpdoctor.record.streams.collectives import Group
from ddpdoctor.record.streams.measured import CallTrack, StepTrack
from tests.diagnosis.measured_job import GRADIENT_BYTES, MILLISECOND_NS, MeasuredJob

EVEN = {"data_wait": 2.0, "forward": 10.0, "backward": 20.0, "optimizer": 5.0, "other": 3.0}


def ms(nanoseconds: float | None) -> float | None:
    return None if nanoseconds is None else round(nanoseconds / MILLISECOND_NS, 3)


def total(phases: Phases) -> float:
    return sum(part or 0.0 for part in msgspec.structs.astuple(phases)[1:])


def test_an_even_job_has_phases_that_add_up_and_nobody_late() -> None:
    summary = summarise(MeasuredJob(2).run(40, EVEN, transfer=10.0, hidden=15.0).record())
    assert summary.phases is not None and summary.step_times is not None
    assert (summary.steps, ms(summary.phases.step_ns), ms(summary.step_times.p50_ns)) == (37, 50.0, 50.0)
    assert (ms(summary.phases.exposed_waiting_ns), ms(summary.phases.exposed_transfer_ns)) == (0.0, 10.0)
    assert ms(summary.phases.backward_compute_ns) == 20.0
    assert (summary.exposed_share, summary.efficiency, summary.overlap_ratio) == pytest.approx((0.2, 0.8, 0.6))
    assert (summary.samples_per_s, summary.steps_per_s) == pytest.approx((2 * 32 / 0.05, 20.0))
    assert summary.seconds == pytest.approx(37 * 0.05)
    for rank in summary.ranks:
        assert total(rank.phases) == pytest.approx(rank.phases.step_ns)
        assert (rank.late_ns, rank.late_phase, rank.waiting_ns) == (0.0, "", 0.0)
        assert (rank.bytes_per_step, rank.collectives_per_step) == (GRADIENT_BYTES, 4)


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("late_ms", [20.0, 100.0])
@pytest.mark.parametrize("phase", ["data_wait", "forward", "backward", "optimizer", "other"])
def test_the_late_rank_is_known_with_its_phase_and_what_the_others_wait(
    phase: str, late_ms: float, barrier: bool
) -> None:
    job = MeasuredJob(3).run(40, EVEN, {1: {phase: late_ms}}, transfer=4.0, barrier=barrier)
    ranks = {rank.rank: rank for rank in summarise(job.record()).ranks}
    assert [ms(ranks[rank].waiting_ns) for rank in (0, 1, 2)] == [late_ms, 0.0, late_ms]
    assert [ms(ranks[rank].late_ns) for rank in (0, 1, 2)] == [0.0, late_ms, 0.0]
    assert [ranks[rank].late_phase for rank in (0, 1, 2)] == ["", phase, ""]
    assert all(total(rank.phases) == pytest.approx(rank.phases.step_ns) for rank in ranks.values())


def test_the_lateness_of_a_rank_is_what_it_would_save_to_come_with_the_second_last() -> None:
    job = MeasuredJob(3).run(40, EVEN, {1: {"forward": 30.0}, 2: {"forward": 50.0}})
    ranks = {rank.rank: rank for rank in summarise(job.record()).ranks}
    assert [ms(ranks[rank].late_ns) for rank in (0, 1, 2)] == [0.0, 0.0, 20.0]
    assert [ms(ranks[rank].waiting_ns) for rank in (0, 1, 2)] == [50.0, 20.0, 0.0]


def test_work_between_two_steps_makes_a_rank_late_as_well() -> None:
    job = MeasuredJob(2).run(4, EVEN)
    for _ in range(30):
        job.pause(25.0, 0)
        job.run(1, EVEN)
    rank, _ = summarise(job.record()).ranks
    assert (rank.late_phase, rank.times_late) == ("other", 30)
    assert ms(rank.late_ns) == pytest.approx(25.0, rel=0.05)


def test_steps_that_were_not_sampled_count_in_everything_but_the_exposed_communication() -> None:
    job = MeasuredJob(2).run(40, EVEN, {1: {"forward": 20.0}}, transfer=10.0, sampled=10)
    summary = summarise(job.record())
    rank, late = summary.ranks
    assert rank.steps == 37
    assert (ms(rank.phases.exposed_waiting_ns), ms(rank.phases.exposed_transfer_ns)) == (20.0, 10.0)
    assert (ms(rank.phases.backward_compute_ns), ms(late.late_ns), late.late_phase) == (20.0, 20.0, "forward")


def test_without_a_sampled_step_the_exposed_communication_is_unknown_and_part_of_backward() -> None:
    summary = summarise(MeasuredJob(2).run(40, EVEN, transfer=10.0, sampled=1_000).record())
    assert summary.phases is not None
    assert (summary.phases.exposed_waiting_ns, summary.phases.exposed_transfer_ns) == (None, None)
    assert ms(summary.phases.backward_compute_ns) == 30.0
    assert total(summary.phases) == pytest.approx(summary.phases.step_ns)
    assert (summary.exposed_share, summary.efficiency, summary.overlap_ratio) == (None, None, None)
    assert (summary.traffic, summary.ranks[0].late_ns) == ((), None)


def test_what_is_not_known_of_one_rank_stays_in_the_phase_that_it_lies_in() -> None:
    whole, other = (MeasuredJob(2).run(40, EVEN, transfer=10.0, sampled=n).record().step_tracks for n in (1, 1_000))
    summary = summarise(MeasuredJob(2).run(1, EVEN).record(step_tracks=(whole[0], other[1])))
    assert summary.phases is not None
    assert (summary.phases.exposed_waiting_ns, ms(summary.phases.exposed_transfer_ns)) == (None, 5.0)
    assert total(summary.phases) == pytest.approx(summary.phases.step_ns)


def test_the_first_steps_and_those_after_a_pause_are_no_measure() -> None:
    job = MeasuredJob(2).run(3, {"data_wait": 900.0}).run(20, EVEN)
    job.pause(5_000.0)
    job.run(1, {"data_wait": 900.0}).run(20, EVEN)
    summary = summarise(job.record())
    assert summary.phases is not None
    assert (summary.steps, ms(summary.phases.step_ns)) == (40, 40.0)
    assert summary.seconds > 5.0 and summary.samples_per_s == pytest.approx(2 * 32 / 0.04)


def test_the_step_in_which_the_others_wait_for_a_pause_of_one_rank_is_no_measure_of_communication() -> None:
    even, job = {**EVEN, "backward": 20.0}, MeasuredJob(2)
    for _ in range(3):
        job.run(30, even, transfer=2.0, sampled=4)
        job.pause(12_000.0, 0)
    summary = summarise(job.run(30, even, transfer=2.0, sampled=4).record())
    assert summary.steps == 120 - 3 - 3
    assert [ms(rank.phases.exposed_transfer_ns) for rank in summary.ranks] == [2.0, 2.0]
    assert [ms(rank.phases.exposed_waiting_ns) for rank in summary.ranks] == [0.0, 0.0]
    mostly = MeasuredJob(2).run(10, even, transfer=2.0)
    for _ in range(30):
        mostly.pause(1_500.0, 0)
        mostly.run(1, even, transfer=2.0)
    assert summarise(mostly.record()).steps == 40 - 3, "where most steps follow a pause, that is how the job goes"


def test_a_run_that_has_only_begun_shows_what_there_is() -> None:
    assert summarise(MeasuredJob(2).run(2, EVEN).record()).steps == 2
    assert summarise(MeasuredJob(2).record()) == RunSummary()


def test_the_recent_steps_are_those_of_the_last_seconds() -> None:
    job = MeasuredJob(2).run(40, {"forward": 100.0}, barrier=True).run(40, {"forward": 20.0}, barrier=True)
    record = recent(job.record(), 500 * MILLISECOND_NS)
    phases = summarise(record).phases
    assert phases is not None and ms(phases.step_ns) == 20.0
    assert {len(track) for track in record.step_tracks} == {26}
    assert {len(track) for track in record.call_tracks} == {26}
    assert all(len(track.sequence) == len(track.size_bytes) for track in record.call_tracks)


def test_steps_are_paired_by_their_ordinal_where_rows_are_lost() -> None:
    whole = MeasuredJob(2).run(60, EVEN, {1: {"forward": 20.0}}).record()
    cut = recent(whole, 1_500 * MILLISECOND_NS)
    summary = summarise(msgspec.structs.replace(whole, step_tracks=(whole.step_tracks[0], cut.step_tracks[1])))
    assert ms(summary.ranks[0].waiting_ns) == 20.0


def test_samples_are_unknown_where_a_rank_cannot_tell_them() -> None:
    assert summarise(MeasuredJob(2).run(40, EVEN, samples=0).record()).samples_per_s is None


def test_gradients_and_explicit_collectives_are_counted_by_group() -> None:
    job = MeasuredJob(4, kinds=("barrier", "all_reduce"))
    job.groups.append(Group(ranks=(0, 1), backend="gloo"))
    for _ in range(40):
        job.run(1, {**EVEN, "other": 30.0}, transfer=10.0, hidden=10.0)
        for rank, early in ((0, 8.0), (1, 3.0)):
            end = job.now_ms[rank] - 2.0
            job.call(rank, "all_reduce", end - early, end + 1.0, group=1, size_bytes=4_000_000)
    traffic = {(entry.group, entry.kind): entry for entry in summarise(job.record()).traffic}
    gradients, pair = traffic["all 4 ranks", "gradients"], traffic["ranks 0 and 1", "all_reduce"]
    assert (gradients.calls_per_step, gradients.bytes_per_step, ms(gradients.ns_per_step)) == (4, GRADIENT_BYTES, 20.0)
    assert gradients.bus_bandwidth_bytes_per_s == pytest.approx(2 * 3 / 4 * GRADIENT_BYTES / 0.020)
    assert (pair.calls_per_step, pair.bytes_per_step, ms(pair.ns_per_step)) == (1, 4_000_000, 6.5)
    assert pair.bus_bandwidth_bytes_per_s == pytest.approx(4_000_000 / 0.004)
    ranks = {rank.rank: rank for rank in summarise(job.record()).ranks}
    assert [ms(ranks[rank].waiting_ns) for rank in (0, 1, 2)] == [5.0, 0.0, 0.0]


def sharded(backend: str = "gloo") -> MeasuredJob:
    """A job that gathers and scatters in each step; what a forward calls is recorded as of the step before it."""
    job = MeasuredJob(2, kinds=("barrier", "all_gather_into_tensor", "reduce_scatter_tensor"), backend=backend)
    for _ in range(40):
        for rank in job.ranks:
            job.call(rank, "all_gather_into_tensor", job.now_ms[rank] + 5.0, job.now_ms[rank] + 10.0, size_bytes=1000)
            job.call(rank, "reduce_scatter_tensor", job.now_ms[rank] + 40.0, job.now_ms[rank] + 45.0, size_bytes=1000)
        job.run(1, {**EVEN, "other": 30.0}, sampled=1000, explicit_ns=10 * MILLISECOND_NS, reduced_bytes=0, buckets=0)
    return job


def test_a_call_counts_in_the_step_in_which_it_was_made_whatever_step_it_was_recorded_with() -> None:
    traffic = {entry.kind: entry for entry in summarise(sharded().record()).traffic}
    assert ms(traffic["all_gather_into_tensor"].ns_per_step) == 5.0
    assert traffic["reduce_scatter_tensor"].calls_per_step == 1


def test_what_a_sharded_job_is_held_up_by_its_calls_is_its_exposed_communication() -> None:
    summary = summarise(sharded().record())
    assert summary.phases is not None and summary.phases.exposed_transfer_ns is None
    held = 10 * MILLISECOND_NS / summary.phases.step_ns
    assert summary.exposed_share == pytest.approx(held)
    assert summary.efficiency == pytest.approx(1 - held)
    on_gpus = summarise(sharded("nccl").record())
    assert (on_gpus.exposed_share, on_gpus.efficiency) == (None, None), "calls that return at once say nothing"


def two_models() -> MeasuredJob:
    """A job with two backwards in a step: none waits in the first (4 ms), rank 0 waits 20 ms in the other."""
    job = MeasuredJob(2)
    for step in range(60):
        job.run(1, EVEN, {1: {"forward": 20.0}}, transfer=2.0)
        for rank, rows in job.rows.items():
            rows["exposed_ns"][-1] += 4 * MILLISECOND_NS
            rows["backward_ns"][-1] += 4 * MILLISECOND_NS
            rows["ended_at_ns"][-1] += 4 * MILLISECOND_NS
            if step % 2:
                rows["ready_at_ns"][-1] = rows["started_at_ns"][-1] + 5 * MILLISECOND_NS
                rows["reduced_at_ns"][-1] = rows["ready_at_ns"][-1] + 4 * MILLISECOND_NS
            job.pause(4.0, rank)
    return job


def test_waiting_is_known_of_a_step_in_which_the_ranks_meet_twice_and_a_row_holds_one_of_the_meetings() -> None:
    rank, late = summarise(two_models().record()).ranks
    assert ms(rank.phases.exposed_waiting_ns) == pytest.approx(20.0, rel=0.02)
    assert ms(rank.phases.exposed_transfer_ns) == pytest.approx(6.0, rel=0.05)
    assert ms(late.late_ns) == pytest.approx(20.0, rel=0.02)
    assert late.late_phase == "forward"


def test_rows_that_hold_another_meeting_on_each_rank_are_not_compared() -> None:
    job = two_models()
    for number, rows in job.rows.items():
        for row in range(40, 60):
            rows["ready_at_ns"][row] = rows["started_at_ns"][row] + (5 if number else 45) * MILLISECOND_NS
            rows["reduced_at_ns"][row] = rows["ready_at_ns"][row] + 4 * MILLISECOND_NS
    rank, _ = summarise(job.record()).ranks
    assert ms(rank.phases.exposed_waiting_ns) == pytest.approx(20.0, rel=0.02)


def test_who_waits_in_one_group_of_a_mesh_is_not_late_in_the_other_and_the_late_one_is_late_once() -> None:
    job = MeasuredJob(4, kinds=("barrier", "all_gather_into_tensor", "all_reduce"))
    job.groups.extend(Group(ranks=ranks, backend="gloo") for ranks in ((0, 1), (2, 3), (0, 2), (1, 3)))
    for _ in range(40):
        began = dict(job.now_ms)
        job.run(1, {**EVEN, "other": 60.0}, sampled=1000, explicit_ns=40 * MILLISECOND_NS)
        came = {rank: began[rank] + (35.0 if rank == 3 else 5.0) for rank in job.ranks}
        left = {0: 6.0, 1: 6.0, 2: 36.0, 3: 36.0}
        for rank in job.ranks:
            job.call(rank, "all_gather_into_tensor", came[rank], began[rank] + left[rank], group=1 + rank // 2)
            job.call(rank, "all_reduce", began[rank] + left[rank] + 1.0, began[rank] + 38.0, group=3 + rank % 2)
    late = {rank.rank: ms(rank.late_ns) for rank in summarise(job.record()).ranks}
    assert late == {0: 0.0, 1: 0.0, 2: 0.0, 3: 30.0}


def test_the_bandwidth_is_unknown_where_everything_was_hidden() -> None:
    (gradients,) = summarise(MeasuredJob(2).run(40, EVEN, hidden=20.0).record()).traffic
    assert (gradients.overlap_ratio, gradients.bus_bandwidth_bytes_per_s) == (1.0, None)


def test_ranks_wait_only_for_those_they_average_gradients_with() -> None:
    job = MeasuredJob(4).run(40, EVEN, {3: {"forward": 20.0}})
    wraps = tuple(Wrap(rank=rank, wrap=0, ranks=(0, 1) if rank < 2 else (2, 3)) for rank in job.ranks)
    summary = summarise(job.record(wraps=wraps))
    assert [entry.group for entry in summary.traffic] == ["ranks 0 and 1", "ranks 2 and 3"]
    ranks = {rank.rank: rank for rank in summary.ranks}
    assert [ms(ranks[rank].phases.exposed_waiting_ns) for rank in job.ranks] == [0.0, 0.0, 20.0, 0.0]


def test_on_a_gpu_the_stream_says_what_took_how_long_and_the_least_exposed_is_late() -> None:
    job = MeasuredJob(2, device="cuda", backend="nccl")
    job.run(40, {"data_wait": 1.0, "forward": 2.0, "backward": 2.0, "other": 95.0})
    record = job.record()
    tracks = []
    for track, exposed_ms in zip(record.step_tracks, (35, 5), strict=True):
        milliseconds = {"exposed_ns": exposed_ms, "window_ns": 60, "device_forward_ns": 20, "device_backward_ns": 65}
        columns = {name: array("q", [value * MILLISECOND_NS] * 40) for name, value in milliseconds.items()}
        tracks.append(msgspec.structs.replace(track, **columns))
    rank, late = summarise(msgspec.structs.replace(record, step_tracks=tuple(tracks))).ranks
    assert (ms(rank.phases.forward_ns), ms(rank.phases.backward_compute_ns)) == (20.0, 30.0)
    assert (ms(rank.phases.exposed_waiting_ns), ms(rank.phases.exposed_transfer_ns)) == (30.0, 5.0)
    assert (ms(late.late_ns), late.late_phase, ms(late.waiting_ns)) == (30.0, "backward", 0.0)
    assert total(rank.phases) == pytest.approx(rank.phases.step_ns)


def test_what_nobody_waits_in_a_broadcast_is_lost_where_the_ranks_meet_next() -> None:
    job = MeasuredJob(2, kinds=("barrier", "buffers"))
    for _ in range(40):
        for number, after in ((0, 1.0), (1, 21.0)):
            job.call(number, "buffers", job.now_ms[number] + after, job.now_ms[number] + after + 0.1)
        job.run(1, EVEN, {1: {"forward": 20.0}})
        for calls in job.calls.values():
            calls["step"][-1] = job.step
    rank, late = summarise(job.record()).ranks
    assert (ms(late.late_ns), ms(rank.waiting_ns)) == (20.1, 20.1)
    assert late.late_phase == "forward"


def test_broadcasts_of_buffers_are_counted_for_themselves() -> None:
    job = MeasuredJob(2, kinds=("barrier", "buffers")).run(40, EVEN, {1: {"other": 5.0}}, barrier=True)
    for rank in job.ranks:
        for step in range(40):
            at = job.rows[rank]["started_at_ns"][step] / MILLISECOND_NS
            job.call(rank, "buffers", at + 2.0, at + 3.0)
            job.calls[rank]["sequence"][-1] = step
            job.calls[rank]["step"][-1] = step + 1
    kinds = {entry.kind: entry.calls_per_step for entry in summarise(job.record()).traffic}
    assert kinds == {"gradients": 4, "barrier": 1, "buffers": 1}


def test_no_phase_is_named_where_none_explains_most_of_the_lateness() -> None:
    slower = {"data_wait": 4.0, "forward": 5.0, "backward": 4.0}
    _, everywhere = summarise(MeasuredJob(2).run(40, EVEN, {1: slower}).record()).ranks
    assert (ms(everywhere.late_ns), everywhere.late_phase) == (13.0, "")
    job = MeasuredJob(2)
    for step in range(60):
        job.run(1, EVEN, {1: {("data_wait", "forward", "backward")[step % 3]: 10.0}})
    _, changing = summarise(job.record()).ranks
    assert (ms(changing.late_ns), changing.late_phase) == (10.0, "")


def test_an_optimizer_makes_its_rank_late_for_the_next_step() -> None:
    job = MeasuredJob(2)
    for step in range(60):
        job.run(1, EVEN, {1: {"optimizer": 30.0 * (step % 3 == 0)}})
    _, late = summarise(job.record()).ranks
    assert ms(late.late_ns) == pytest.approx(10.0, rel=0.1)
    assert late.late_phase == "optimizer"


def test_sends_and_receives_are_no_meeting() -> None:
    job = MeasuredJob(2, kinds=("barrier", "batch_isend_irecv")).run(40, EVEN)
    for rank in job.ranks:
        job.call(rank, "batch_isend_irecv", job.now_ms[rank] - 20.0 * (rank + 1), job.now_ms[rank])
        job.calls[rank]["sequence"][-1] = -1
    assert [entry.kind for entry in summarise(job.record()).traffic] == ["gradients"]


def test_clocks_that_differ_between_machines_make_nobody_late() -> None:
    job = MeasuredJob(2).run(40, EVEN, {1: {"forward": 20.0}}, transfer=5.0, barrier=True)
    record = job.record(ranks=tuple(Rank(rank=rank, host=f"node{rank}", node=rank) for rank in job.ranks))
    ahead = 500 * MILLISECOND_NS

    def shifted(track: StepTrack | CallTrack) -> StepTrack | CallTrack:
        columns = {
            name: array("q", [value + ahead for value in values])
            for name, values in msgspec.structs.asdict(track).items()
            if name.endswith("_at_ns")
        }
        return msgspec.structs.replace(track, **columns)

    tracks = (record.step_tracks[0], shifted(record.step_tracks[1]))
    calls = (record.call_tracks[0], shifted(record.call_tracks[1]))
    rank, late = summarise(msgspec.structs.replace(record, step_tracks=tracks, call_tracks=calls)).ranks
    assert [ms(rank.waiting_ns), ms(late.waiting_ns)] == [20.0, 0.0]
    assert (ms(late.late_ns), late.late_phase, ms(rank.phases.exposed_transfer_ns)) == (20.0, "forward", 5.0)


def test_of_a_job_with_long_steps_enough_of_the_newest_ones_are_taken_however_long_ago_they_were() -> None:
    record = MeasuredJob(2).run(60, {"forward": 2_000.0}).record()
    second_ns = 1_000 * MILLISECOND_NS
    assert summarise(recent(record, 30 * second_ns)).steps < 20
    assert summarise(recent(record, 30 * second_ns, 120, 23)).steps >= 20
    assert summarise(recent(record, 80 * second_ns, 120, 23)).steps >= 40
    assert summarise(recent(record, 80 * second_ns, 23, 23)).steps <= 23


def test_the_hidden_share_of_a_job_with_a_straggler_is_the_same_in_every_figure() -> None:
    job = MeasuredJob(2).run(40, {**EVEN, "backward": 30.0}, {1: {"data_wait": 50.0}}, transfer=10.0, hidden=10.0)
    summary = summarise(job.record())
    (gradients,) = summary.traffic
    assert [rank.overlap_ratio for rank in summary.ranks] == pytest.approx([1 - 60 / 70, 1 - 10 / 20])
    assert gradients.overlap_ratio == summary.overlap_ratio == pytest.approx(1 - 70 / 90)
