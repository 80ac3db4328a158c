from __future__ import annotations

import msgspec
import pytest

from ddpdoctor.checks.death import gpu_fault
from ddpdoctor.checks.speed import gpu_throttled, idle_gpu
from ddpdoctor.diagnosis.performance.gpus import gpu_uses, mean_utilisation
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.measured import CLOCKS_SET, HARDWARE_SLOWDOWN, POWER_LIMIT, TOO_HOT, reasons_in_words
from tests.gpu.jobs import gpu, looks, record, steps


def titles(check: object, run: RunRecord) -> list[str]:
    return [item.title for item in check.in_run(run) if isinstance(item, Finding)]  # type: ignore[attr-defined]


def test_what_spins_in_communication_kernels_is_no_use() -> None:
    tracks = [steps(0, exposed=0.4, explicit=0.1), steps(1)]
    pair = [gpu(0, looks()), gpu(1, looks())]
    first, second = gpu_uses(record(pair, tracks))
    assert first.utilisation_percent == pytest.approx(97)
    assert first.computing_percent == pytest.approx(47)
    assert second.computing_percent == pytest.approx(97)
    assert [round(figure or 0) for figure in mean_utilisation(record(pair, tracks))] == [97, 72]
    # With gloo the CPU waits: the GPU's figure is right as it is.
    assert [round(figure or 0) for figure in mean_utilisation(record(pair, tracks, backend="gloo"))] == [97, 97]
    assert mean_utilisation(record([])) == (None, None)


def test_only_samples_that_fall_wholly_into_training_count() -> None:
    idle_before_and_after = looks(30, first_s=-29, utilisation=0) + looks(28) + looks(30, first_s=31, utilisation=0)
    (use,) = gpu_uses(record([gpu(0, idle_before_and_after)], [steps(0, count=300)]))
    assert (use.utilisation_percent, use.samples) == (97, 28)
    in_a_pause = looks(20) + looks(30, first_s=22, utilisation=0) + looks(8, first_s=52)
    (use,) = gpu_uses(record([gpu(0, in_a_pause)], [steps(0, pause_after=210, pause_s=31)]))
    assert (use.utilisation_percent, use.samples) == (97, 27)


def test_a_gpu_that_nothing_else_explains_is_idle() -> None:
    idle = looks(utilisation=[20, 30])
    assert titles(idle_gpu, record([gpu(0, idle), gpu(1, looks())])) == [
        "the GPU of rank 0 computes for 25% of the training"
    ]
    both = record([gpu(0, looks(utilisation=25)), gpu(1, looks(utilisation=40))])
    (finding,) = idle_gpu.in_run(both)
    assert isinstance(finding, Finding)
    assert finding.title == "the GPUs of ranks 0 and 1 compute for 25 to 40% of the training"
    assert finding.ranks == (0, 1)
    assert "of a step of 100.0 ms" in finding.evidence[0].text


def test_a_gpu_that_only_seems_busy_is_idle() -> None:
    run = record([gpu(0, looks())], [steps(0, explicit=0.6)])
    (finding,) = idle_gpu.in_run(run)
    assert isinstance(finding, Finding)
    assert finding.title == "the GPU of rank 0 computes for 37% of the training"
    assert "the driver reads 97%, of which 60% is communication kernels alone" in finding.evidence[0].text


@pytest.mark.parametrize(
    "run",
    [
        record([gpu(0, looks())]),
        record([gpu(0, looks(utilisation=60))]),
        record([gpu(0, looks(utilisation=30))], [steps(0, data_wait=0.6)]),
        record([gpu(0, looks(utilisation=97))], [steps(0, exposed=0.6)]),
        record([gpu(0, looks(15, utilisation=5))]),
        record([gpu(0, looks(utilisation=None))]),
        record([gpu(0, looks(utilisation=5), 7)]),
        record([]),
    ],
    ids=["busy", "fairly-busy", "input-bound", "exposed", "too-early", "unknown", "of-no-rank", "none"],
)
def test_a_gpu_that_is_busy_or_that_other_findings_explain_is_not_idle(run: RunRecord) -> None:
    assert titles(idle_gpu, run) == []


def test_a_hot_gpu_is_throttled() -> None:
    hot = looks(20, clock=1110, reasons=(TOO_HOT, POWER_LIMIT)) + looks(30, first_s=22)
    (finding,) = gpu_throttled.in_run(record([gpu(0, looks()), gpu(1, hot)]))
    assert isinstance(finding, Finding)
    assert (finding.title, finding.severity) == ("the GPU of rank 1 is too hot", Severity.WARNING)
    assert finding.evidence[0].text == "GPU 1: 1,110 MHz at work (at most 1,980 MHz), 70 °C, 500 W of 700 W"
    all_hot = [gpu(index, looks(clock=1300, reasons=(TOO_HOT,))) for index in range(4)]
    assert titles(gpu_throttled, record(all_hot)) == ["each GPU of ranks 0-3 is too hot"]


def test_a_gpu_that_is_slower_than_its_peers_is_throttled() -> None:
    lowered = gpu(2, looks(clock=1200, reasons=(POWER_LIMIT,)), limit_w=300)
    peers = [gpu(index, looks(clock=1700, reasons=(POWER_LIMIT,))) for index in (0, 1, 3)]
    assert titles(gpu_throttled, record([*peers, lowered])) == [
        "the GPU of rank 2 is held at a power limit of 300 W, where 700 W is usual"
    ]
    fixed = gpu(2, looks(clock=1200, reasons=(CLOCKS_SET,)))
    assert titles(gpu_throttled, record([*peers, fixed])) == [
        "the GPU of rank 2 is slowed down (clocks set by an administrator)"
    ]
    assert titles(gpu_throttled, record([*peers, gpu(2, looks(clock=1200))])) == [
        "the GPU of rank 2 runs at a low clock rate"
    ]


def test_a_limit_that_somebody_lowered_on_all_gpus_is_advice() -> None:
    lowered = [gpu(index, looks(clock=1200, reasons=(POWER_LIMIT,)), limit_w=300) for index in range(2)]
    (finding,) = gpu_throttled.in_run(record(lowered))
    assert isinstance(finding, Finding)
    assert finding.severity is Severity.ADVICE


@pytest.mark.parametrize(
    "samples",
    [
        looks(clock=1500, reasons=(POWER_LIMIT,)),
        looks(8, clock=1110, reasons=(TOO_HOT,)),
        looks(5, clock=1110, reasons=(TOO_HOT,)) + looks(40, first_s=7),
        looks(clock=1950, reasons=(TOO_HOT,)),
        looks(clock=345, utilisation=0),
        looks(clock=None, reasons=(HARDWARE_SLOWDOWN,)),
    ],
    ids=["power-limit", "too-few", "briefly", "hardly", "idle", "unknown"],
)
def test_a_gpu_that_hardly_suffers_is_not_throttled(samples: object) -> None:
    pair = [gpu(index, samples) for index in range(2)]  # type: ignore[arg-type]
    assert titles(gpu_throttled, record(pair)) == []


def test_a_project_sets_its_own_limits_for_idle_and_for_slow_gpus() -> None:
    def with_limit(run: RunRecord, **thresholds: float) -> RunRecord:
        named = {name.replace("_", "-"): share for name, share in thresholds.items()}
        return msgspec.structs.replace(run, job=msgspec.structs.replace(run.job, thresholds=named))

    quarter = record([gpu(0, looks(utilisation=25))])
    assert titles(idle_gpu, with_limit(quarter, idle_gpu=0.2)) == []
    most = record([gpu(0, looks(utilisation=85))])
    assert titles(idle_gpu, most) == []
    assert titles(idle_gpu, with_limit(most, idle_gpu=0.9)) == ["the GPU of rank 0 computes for 85% of the training"]
    slower = record([*(gpu(index, looks(clock=1900)) for index in range(3)), gpu(3, looks(clock=1700))])
    assert titles(gpu_throttled, slower) == []
    assert titles(gpu_throttled, with_limit(slower, gpu_throttled=0.95)) == [
        "the GPU of rank 3 runs at a low clock rate"
    ]


def test_reasons_of_the_driver_in_words() -> None:
    assert reasons_in_words(0x0) == reasons_in_words(0x1) == ()
    assert reasons_in_words(0x8) == (HARDWARE_SLOWDOWN,)
    assert reasons_in_words(0x8 | 0x40 | 0x20 | 0x4 | 0x1) == (TOO_HOT, POWER_LIMIT)


def test_faults_of_gpus_are_errors() -> None:
    fell = looks(10) + looks(5, first_s=12, utilisation=None, xid=79, lost=True)
    (finding,) = gpu_fault.in_run(record([gpu(0, looks()), gpu(1, fell)]))
    assert isinstance(finding, Finding)
    assert finding.title == "the GPU of rank 1 is lost: the driver can no longer reach it"
    assert finding.evidence[0].text == "GPU 1 (H100): the driver reported Xid 79: it fell off the bus"
    memory = looks(10, ecc_errors=2) + looks(5, first_s=12, ecc_errors=3)
    assert titles(gpu_fault, record([gpu(0, memory)])) == ["the GPU of rank 0 has uncorrected memory errors"]
    (kernel,) = gpu_fault.in_run(record([gpu(0, looks(xid=31))]))
    assert isinstance(kernel, Finding)
    assert "compute-sanitizer" in kernel.remedy


@pytest.mark.parametrize("samples", [looks(ecc_errors=7), looks(xid=63), looks(xid=45), looks(), ()])
def test_old_errors_and_harmless_events_are_no_faults(samples: object) -> None:
    assert titles(gpu_fault, record([gpu(0, samples)])) == []  # type: ignore[arg-type]


def test_a_fault_of_a_gpu_that_no_rank_uses_is_not_of_this_job() -> None:
    other = gpu(1, looks(xid=79, lost=True))
    assert titles(gpu_fault, record([gpu(0, looks()), type(other)(index=1, samples=other.samples)])) == []
