from __future__ import annotations

import time

import pytest

from ddpdoctor.errors import ExitCode, NoGround, UsageError
from ddpdoctor.record.layout import CORE_TIME
from ddpdoctor.record.streams.measured import Gauge
from ddpdoctor.record.streams.setup import Node
from ddpdoctor.what_if.answer import what_if
from ddpdoctor.what_if.links import Link, on_other_ranks
from ddpdoctor.what_if.observed import RankTimes, Scenario, observe, replay
from ddpdoctor.what_if.scenario import Change, Model, Outcome
from ddpdoctor.what_if.settings import Settings, layout_with, parse, ready_shares
from tests.diagnosis.measured_job import MeasuredJob
from tests.machine_speed import is_within
from tests.what_if.records import EVEN, MEGABYTE, bucketed, record_of

MS = 1e6


def model_of(job: MeasuredJob, **more: object) -> Model:
    return Model(observe(record_of(job, **more)))  # type: ignore[arg-type]


def predicted(model: Model, *words: str) -> Outcome:
    return model.outcome(parse(words))


def step_ms(model: Model, *words: str) -> float:
    return predicted(model, *words).step_ns.value / MS


def times(rank: int, forward_ms: float, backward_ms: float, lead_ms: float = 0.0, steps: int = 4) -> RankTimes:
    return RankTimes(
        rank=rank,
        data_wait=(0.0,) * steps,
        forward=(forward_ms * MS,) * steps,
        backward=(backward_ms * MS,) * steps,
        lead=(lead_ms * MS,) * steps,
        optimizer=(0.0,) * steps,
        other=(0.0,) * steps,
    )


def test_buckets_leave_in_order_over_one_stream_once_all_ranks_have_them() -> None:
    made = Scenario(
        ranks=(times(0, 10, 40, 30), times(1, 10, 40, 30)),
        micro_batches=1,
        synchronised=1,
        bucket_ns=(20 * MS, 20 * MS),
        bucket_shares=(1.0, 0.0),
        one_bucket_seen=False,
    )
    # Launched at 20 and 50 ms: the first is there at 40, the second leaves with the last gradient and takes 20.
    assert replay(made).mean_ns == pytest.approx(70 * MS)
    assert replay(made).exposed_ns == pytest.approx(20 * MS)
    assert sum(replay(made).waiting_ns) == 0


def test_the_early_ranks_wait_for_the_late_one() -> None:
    made = Scenario(
        ranks=(times(0, 10, 40), times(1, 30, 40)),
        micro_batches=1,
        synchronised=1,
        bucket_ns=(5 * MS,),
        bucket_shares=(0.0,),
        one_bucket_seen=False,
    )
    told = replay(made)
    assert told.mean_ns == pytest.approx(75 * MS)
    assert told.waiting_ns == pytest.approx((20 * MS, 0))


def test_a_bucket_that_is_full_waits_for_the_one_ahead_of_it() -> None:
    made = Scenario(
        ranks=(times(0, 0, 40, 40), times(1, 0, 40, 40)),
        micro_batches=1,
        synchronised=1,
        bucket_ns=(50 * MS, 5 * MS),
        bucket_shares=(1.0, 0.5),
        one_bucket_seen=False,
    )
    assert replay(made).mean_ns == pytest.approx(55 * MS)


def test_the_run_itself_is_reproduced() -> None:
    for slower in (None, {1: {"forward": 25.0}}):
        model = model_of(bucketed(4, 60, slower=slower))
        assert abs(model.error) < 0.01
    sampled = model_of(bucketed(2, 120, sampled=5))
    assert abs(sampled.error) < 0.01


def with_small_all_reduces(each_ms: float) -> MeasuredJob:
    job = MeasuredJob(2, kinds=("all_reduce",))
    for _ in range(40):
        began = max(job.now_ms.values())
        job.run(1, {**EVEN, "other": 1.0 + each_ms}, transfer=18.0, hidden=30.0, explicit_ns=int(each_ms * MS))
        for rank in job.ranks:
            job.call(rank, "all_reduce", began + 15, began + 15 + each_ms, size_bytes=4)
    return job


def test_the_bandwidth_is_fitted_to_what_was_exposed() -> None:
    fitted = model_of(with_small_all_reduces(2.0)).observed.fit
    assert fitted.splits
    assert fitted.best.latency_ns == pytest.approx(2 * MS, rel=0.01)
    # 12 ms a bucket, of which 2 are latency: 10 MB in 10 ms.
    assert fitted.best.ns_per_byte == pytest.approx(1.0, rel=0.05)


def test_without_small_all_reduces_the_interval_holds_both_splits() -> None:
    model = model_of(bucketed(2, 60))
    assert not model.observed.fit.splits
    assert "cannot be separated" in model.observed.fit.ground
    narrow = predicted(model, "link_speed=2").step_ns
    assert narrow.low < step_ms(model, "link_speed=2") * MS < narrow.high


def test_a_bucket_size_is_recommended_only_where_the_run_tells_what_a_call_costs() -> None:
    def cap(job: MeasuredJob) -> Change:
        return next(change for change in what_if(record_of(job)).changes if "bucket_cap_mb" in change.settings)

    untold, told = cap(bucketed(2, 60)), cap(with_small_all_reduces(0.2))
    assert (untold.settings, told.settings) == ({"bucket_cap_mb": 1.0},) * 2
    assert untold.speedup.value > 1.01 and not untold.recommended and "no recommendation" in untold.note
    assert told.speedup.value > 1.01 and told.recommended and not told.note


@pytest.mark.parametrize(
    ("cores", "busy_ms", "is_recommended"),
    [(2, 50.0, False), (2, 15.0, True), (4, 50.0, True), (4, 120.0, False), (0, 50.0, True), (2, 0.0, True)],
    ids=["no core is free", "the ranks sleep", "a core is free", "threads take all", "cores unknown", "use unknown"],
)
def test_a_bucket_size_is_recommended_only_where_a_core_is_free_to_send(
    cores: int, busy_ms: float, is_recommended: bool
) -> None:
    uses = [Gauge(rank=rank, name=CORE_TIME, unit="ns", total=int(busy_ms * MS * 50), steps=50) for rank in (0, 1)]
    record = record_of(
        with_small_all_reduces(0.2),
        nodes=(Node(host="a", ranks=(0, 1), cores=cores),),
        gauges=tuple(uses) if busy_ms else (),
    )
    (change,) = (change for change in what_if(record).changes if "bucket_cap_mb" in change.settings)
    assert change.speedup.value > 1.01
    assert change.recommended is is_recommended
    assert ("no recommendation" in change.note) is not is_recommended


def test_a_cap_does_well_whatever_a_call_costs_that_one_bucket_does_not_tell() -> None:
    # Ten layers of 1 MiB behind each other in one bucket, of which all is exposed.
    job = MeasuredJob(2, backend="gloo").run(60, {**EVEN, "backward": 34.0}, transfer=36.0, hidden=0.0)
    record = record_of(job, layout=(10 << 20,), parameters=(1 << 20,) * 10)
    best = next(change for change in what_if(record).changes if "bucket_cap_mb" in change.settings)
    model = Model(observe(record))
    one, two = (model.outcome(Settings(bucket_cap_mb=cap)) for cap in (1.0, 2.0))
    assert one.speedup.value > two.speedup.value and one.least < two.least, "ten calls are best if they cost little"
    assert (best.settings, best.recommended) == ({"bucket_cap_mb": 2.0}, True)


def test_faster_links_leave_only_what_is_computed() -> None:
    model = model_of(bucketed(2, 60))
    assert model.observed.step_ns / MS == pytest.approx(72, abs=0.5)
    assert step_ms(model, "link_speed=1000") == pytest.approx(54, abs=1.5)


def test_the_straggler_is_put_on_a_level_with_the_rank_in_the_middle() -> None:
    model = model_of(bucketed(4, 60, slower={2: {"forward": 30.0}}))
    assert model.observed.step_ns / MS == pytest.approx(102, abs=0.5)
    assert step_ms(model, "straggler=none") == pytest.approx(72, abs=1)
    assert what_if(model.observed.record).changes[0].title == "rank 2 no slower than the others"


def test_a_rank_that_is_late_now_and_then_loses_its_late_steps() -> None:
    job = MeasuredJob(2)
    for number in range(80):
        job.run(1, EVEN, {1: {"other": 40.0 if number % 4 == 0 else 0.0}}, transfer=18.0, hidden=30.0)
    model = model_of(job)
    assert step_ms(model, "straggler=none") == pytest.approx(72, abs=2)


def test_loaders_keep_up_with_enough_workers_and_no_sooner() -> None:
    model = model_of(bucketed(2, 60, durations={**EVEN, "data_wait": 200.0}))
    rest = model.observed.step_ns / MS - 200
    assert step_ms(model, "workers=1") == pytest.approx(200, rel=0.05)
    assert step_ms(model, "workers=2") == pytest.approx(100, rel=0.05)
    assert step_ms(model, "workers=8") == pytest.approx(rest, rel=0.05)


def test_workers_that_do_not_keep_up_are_taken_at_what_they_make() -> None:
    model = model_of(bucketed(2, 60, durations={**EVEN, "data_wait": 129.0}), workers=2)
    assert model.observed.step_ns / MS == pytest.approx(200, abs=1)
    assert step_ms(model, "workers=4") == pytest.approx(100, rel=0.06)


def test_no_sync_reduces_once_for_several_micro_batches() -> None:
    model = model_of(bucketed(2, 60))
    four = predicted(model, "accumulation=4")
    # Three micro-batches of 52 ms without, one with the exposed 18 ms, one optimizer step.
    assert four.step_ns.value / MS == pytest.approx(4 * 52 + 18 + 2, rel=0.02)
    assert four.speedup.value == pytest.approx(4 * 72 / (4 * 52 + 20), rel=0.02)
    assert four.samples == 4 * 64


def test_micro_batches_that_all_reduce_do_so_no_more_under_no_sync() -> None:
    job = bucketed(2, 60, durations={**EVEN, "backward": 160.0, "forward": 40.0}, micro_batches=4, synchronised=4)
    model = model_of(job)
    once = predicted(model, "accumulation=4")
    assert once.step_ns.value < 0.95 * model.observed.step_ns
    assert once.samples == model.observed.samples
    assert not any("batch of" in change.semantics for change in what_if(model.observed.record).changes[:1])


def test_other_buckets_are_made_as_ddp_makes_them() -> None:
    assert layout_with((5, 5, 5, 5, 5), 9 / (1 << 20)) == (10, 10, 5)
    assert layout_with((5, 5, 5), 9 / (1 << 20), first_bytes=3) == (5, 10)
    assert layout_with((50,), 9 / (1 << 20)) == (50,)


def test_gradients_get_ready_evenly_between_what_was_seen() -> None:
    assert ready_shares((10, 10, 10), (10, 10, 10)) == pytest.approx((1.0, 0.5, 0.0))
    assert ready_shares((5, 5, 5, 5, 10), (10, 10, 10)) == pytest.approx((1.25, 1.0, 0.75, 0.5, 0.0))
    assert ready_shares((10, 10), (20,)) == pytest.approx((0.5, 0.0))


def test_one_bucket_hides_nothing_and_small_ones_more() -> None:
    model = model_of(bucketed(2, 60))
    assert step_ms(model, "bucket_cap_mb=1000") == pytest.approx(54 + 48, rel=0.03)
    assert step_ms(model, "bucket_cap_mb=4") < model.observed.step_ns / MS


def test_half_the_bytes_take_half_the_time_beyond_the_latency() -> None:
    model = model_of(bucketed(2, 60))
    outcome = predicted(model, "hook=bf16_compress")
    assert outcome.scenario.bucket_ns[0] == pytest.approx(6 * MS, rel=0.1)
    assert outcome.step_ns.value < model.observed.step_ns


def test_collectives_and_buffers_fall_away() -> None:
    job = MeasuredJob(2, kinds=("buffers", "barrier"))
    for _ in range(50):
        began = dict(job.now_ms)
        job.run(1, {**EVEN, "other": 9.0}, transfer=18.0, hidden=30.0, explicit_ns=8_000_000)
        for rank in job.ranks:
            job.call(rank, "buffers", began[rank] + 1, began[rank] + 9, size_bytes=1000)
    model = model_of(job)
    assert [meeting.kind for meeting in model.observed.meetings] == ["buffers"]
    assert step_ms(model, "broadcast_buffers=false") == pytest.approx(model.observed.step_ns / MS - 8, abs=1)


def test_a_hop_costs_what_a_ring_or_a_tree_makes_of_it() -> None:
    link = Link(latency_ns=2.0, ns_per_byte=1.0, ranks=2)
    assert on_other_ranks(link, 1, 2, 1) == link
    four = on_other_ranks(link, 1, 4, 1)
    assert four.latency_ns == pytest.approx(4.0)
    assert four.ns_per_byte == pytest.approx(1.5)
    assert on_other_ranks(link, 1, 64, 1).latency_ns == pytest.approx(12.0)
    slow = on_other_ranks(link, 1, 4, 2, between_bytes_per_s=1e8)
    assert slow.ns_per_byte == pytest.approx(10 * 1.5)


def test_more_ranks_are_less_efficient_and_the_limit_is_named() -> None:
    answer = what_if(record_of(bucketed(2, 60)))
    weak, strong = answer.curves
    efficiency = [point.efficiency.value for point in weak.points]
    assert weak.points[0].ranks == 1
    assert efficiency[0] == pytest.approx(1.0)
    assert efficiency == sorted(efficiency, reverse=True)
    assert weak.points[-1].limit == "bandwidth"
    assert "Amdahl" in strong.serial
    # Optimizer and other code are 3 of the 54 ms that a rank takes by itself.
    assert "5.6%" in strong.serial


def test_an_interval_is_wider_where_the_run_is_unsteady() -> None:
    job = MeasuredJob(2)
    for number in range(80):
        job.run(1, {**EVEN, "forward": 10.0 + 20.0 * (number // 10 % 2)}, transfer=18.0, hidden=30.0)
    steady = predicted(model_of(bucketed(2, 80)), "link_speed=2").step_ns
    unsteady = predicted(model_of(job), "link_speed=2").step_ns
    assert unsteady.high - unsteady.low > 1.5 * (steady.high - steady.low)


def test_the_table_is_ordered_and_each_change_has_its_line_and_price() -> None:
    answer = what_if(record_of(bucketed(4, 60, slower={2: {"forward": 30.0}}, durations={**EVEN, "data_wait": 20.0})))
    gains = [change.speedup.value for change in answer.changes]
    assert gains == sorted(gains, reverse=True)
    by_name = {next(iter(change.settings)): change for change in answer.changes}
    assert {"straggler", "workers", "bucket_cap_mb", "accumulation", "hook", "link_speed"} <= set(by_name)
    assert by_name["bucket_cap_mb"].location is not None
    assert by_name["bucket_cap_mb"].location.line == 31
    assert "learning rate" in by_name["accumulation"].semantics
    assert by_name["gradient_as_bucket_view"].memory == "saves 40.0 MB"
    assert set(answer.combination[0].settings) == {"straggler"}
    assert all(
        later.speedup.value > sooner.speedup.value
        for sooner, later in zip(answer.combination, answer.combination[1:], strict=False)
    )


@pytest.mark.parametrize(
    ("cores", "wanted"),
    [(0, 8), (2, 1), (4, 2), (16, 8), (200, 8)],
    ids=["not known", "one for each rank", "two for each rank", "as many as it takes", "more than it takes"],
)
def test_no_more_workers_are_recommended_than_there_are_cores(cores: int, wanted: int) -> None:
    slow = bucketed(2, 60, durations={**EVEN, "data_wait": 400.0})
    answer = what_if(record_of(slow, nodes=(Node(host="a", ranks=(0, 1), cores=cores),)))
    (change,) = (change for change in answer.changes if "workers" in change.settings)
    assert change.settings == {"workers": wanted}
    assert {name for name, _ in change.others} == {"1", "2", "4", "8"} - {str(wanted)}
    assert ("each rank has" in change.note) is bool(cores)


@pytest.mark.parametrize("phase", ["forward", "backward", "other"])
def test_the_remedy_of_a_straggler_names_the_phase_and_both_times(phase: str) -> None:
    slower = {1: {phase: 60.0}}
    answer = what_if(record_of(bucketed(4, 60, slower=slower)))
    (change,) = (change for change in answer.changes if "straggler" in change.settings)
    assert f"look into the {phase if phase != 'other' else 'rest of the loop'}: it takes" in change.do
    assert "on the other ranks" in change.do


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (record_of(bucketed(2, 12)), "too short: 9 steps"),
        (record_of(bucketed(1, 60)), "has one rank"),
        (record_of(bucketed(2, 60), bucket_layouts=(), wraps=()), "no gradients in buckets"),
        (record_of(bucketed(2, 60, sampled=30)), "measured the communication of 2 steps"),
        (record_of(MeasuredJob(2)), "no step of the run was measured"),
        (record_of(bucketed(2, 60), step_tracks=record_of(bucketed(2, 60)).step_tracks[:1]), "rank 1 of 2 left no"),
    ],
)
def test_a_run_that_holds_too_little_gets_no_number(record: object, said: str) -> None:
    with pytest.raises(NoGround, match=said) as told:
        what_if(record)  # type: ignore[arg-type]
    assert told.value.exit_code == ExitCode.INCONCLUSIVE
    assert told.value.hint


@pytest.mark.parametrize(
    "word",
    ["bucket_cap_mb=0", "bucket_cap_mb=nan", "ranks=many", "ranks=0", "workers", "hook=powersgd", "buckets=3",
     "static_graph=yes", "link_speed=-1", "link_speed=inf"],
)  # fmt: skip
def test_a_setting_that_cannot_be_is_refused(word: str) -> None:
    with pytest.raises(UsageError) as told:
        parse([word])
    assert word.partition("=")[0] in told.value.message
    assert told.value.hint


def test_links_between_nodes_that_nobody_saw_have_to_be_told() -> None:
    model = model_of(bucketed(2, 60))
    with pytest.raises(NoGround, match="links between 4 nodes"):
        predicted(model, "ranks=8", "nodes=4")
    slow = predicted(model, "ranks=8", "nodes=4", "internode_gbit_per_s=1").step_ns.value
    assert slow > predicted(model, "ranks=8").step_ns.value
    with pytest.raises(UsageError, match="divided evenly"):
        parse(["ranks=9", "nodes=2"])


def test_settings_are_written_as_they_are_read() -> None:
    settings = parse(["bucket-cap-mb=12.5", "no_sync=4", "static_graph=true"])
    assert settings == Settings(bucket_cap_mb=12.5, accumulation=4, static_graph=True)
    assert parse(settings.text().split(", ")) == settings


def test_a_thousand_steps_of_eight_ranks_are_predicted_within_a_second() -> None:
    job = bucketed(8, 1_000)
    took = []
    for _ in range(2):
        record = record_of(job, layout=(2 * MEGABYTE,) * 20)
        began = time.process_time()
        Model(observe(record)).outcome(Settings(bucket_cap_mb=10.0))
        took.append(time.process_time() - began)
    assert is_within(min(took), 1.0)
