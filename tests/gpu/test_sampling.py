from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.machine import HEALTHY, build_library, machine


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def old_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("old-driver"), "-DOLD")


def test_two_healthy_gpus_are_described_and_sampled(library: Path, tmp_path: Path) -> None:
    with machine(library, tmp_path, HEALTHY) as asked:
        look = asked.sampled()
    first, second = look.gpus
    assert look.note == ""
    assert (first.index, first.uuid, second.index, second.uuid) == (0, "GPU-aaaa", 1, "GPU-bbbb")
    assert first.name == "NVIDIA H100 80GB HBM3"
    assert first.memory_total_bytes == 85_899_345_920
    assert (first.power_limit_w, first.default_power_limit_w) == (700.0, 700.0)
    assert first.maximum_sm_clock_mhz == 1980
    assert first.nvlink_bytes_per_s == pytest.approx(18 * 26.562e9)
    assert first.pcie_bytes_per_s == pytest.approx(63e9, rel=0.01)
    sample = look.newest(0)
    assert (sample.utilisation_percent, sample.memory_used_bytes) == (97.0, 42_949_672_960)
    assert (sample.temperature_c, sample.power_w, sample.sm_clock_mhz) == (61.0, 512.5, 1980)
    assert (sample.throttle_reasons, sample.ecc_errors, sample.xid, sample.lost) == ((), 0, None, False)
    assert sample.processes == ((4001, 1_000_000),)
    assert look.newest(1).processes == ((4002, 2_000_000),)


def test_a_gpu_that_changes_while_it_is_sampled(library: Path, tmp_path: Path) -> None:
    with machine(library, tmp_path, HEALTHY) as asked:
        asked.sampled()
        asked.becomes(HEALTHY | {"gpu1.reasons": "0x6c", "gpu1.temperature": "91", "gpu1.sm_clock": "810"})
        throttled = asked.wait_until(lambda look: bool(look.newest(1).throttle_reasons))
        asked.becomes(HEALTHY | {"xid": "79", "gpu1.ecc": "3"})
        faulty = asked.wait_until(lambda look: look.newest(1).xid is not None and look.newest(1).ecc_errors == 3)
        asked.becomes(HEALTHY | {"gpu1.lost": "1"})
        lost = asked.wait_until(lambda look: look.newest(1).lost)
        asked.becomes(HEALTHY | {"hang": "1"})
        silent = asked.wait_until(lambda look: look.note != "")
        asked.becomes(HEALTHY)
        asked.wait_until(lambda look: look.note == "")
    assert throttled.newest(1).throttle_reasons == ("too hot", "at its power limit")
    assert throttled.newest(0).throttle_reasons == ()
    assert (faulty.newest(1).xid, faulty.newest(0).xid) == (79, None)
    assert lost.newest(1).utilisation_percent is None
    assert not lost.newest(0).lost
    assert silent.note.startswith("the NVIDIA driver has not answered for ")
    assert silent.seconds < 1.0
    assert len(silent.gpus) == 2


def test_a_driver_that_hangs_from_the_start(library: Path, tmp_path: Path) -> None:
    with machine(library, tmp_path, HEALTHY | {"hang": "1"}) as asked:
        silent = asked.wait_until(lambda look: look.note != "")
    assert silent.gpus == ()
    assert silent.note.startswith("the NVIDIA driver has not answered for ")


def test_an_old_driver_tells_what_it_can(old_library: Path, tmp_path: Path) -> None:
    with machine(old_library, tmp_path, HEALTHY | {"gpu.reasons": "0x80"}) as asked:
        look = asked.sampled()
    assert look.gpus[0].name == "NVIDIA H100 80GB HBM3"
    assert (look.gpus[0].nvlink_bytes_per_s, look.gpus[0].pcie_bytes_per_s) == (None, None)
    sample = look.newest(0)
    assert (sample.utilisation_percent, sample.power_w) == (97.0, 512.5)
    assert sample.throttle_reasons == ("power brake by the power supply",)
    assert (sample.ecc_errors, sample.xid, sample.processes, sample.lost) == (None, None, (), False)


def test_what_a_gpu_does_not_support_or_permit_is_not_known(library: Path, tmp_path: Path) -> None:
    values = HEALTHY | {"gpu.utilisation": "!3", "gpu.power": "!4", "gpu.process": "!4", "gpu0.process": "!4"}
    values |= {"gpu.nvlink_speed": "!3", "gpu0.nvlinks": "0", "gpu1.nvlinks": "4", "gpu.name": "!999"}
    with machine(library, tmp_path, values) as asked:
        look = asked.sampled()
    assert (look.newest(0).utilisation_percent, look.newest(0).power_w, look.newest(0).processes) == (None, None, ())
    assert look.newest(0).temperature_c == 61.0
    assert look.gpus[0].nvlink_bytes_per_s is None
    assert look.gpus[1].nvlink_bytes_per_s == pytest.approx(4 * 25e9)
    assert (look.gpus[0].name, look.note) == ("", "")


def test_the_instances_of_a_divided_gpu_stand_for_themselves(library: Path, tmp_path: Path) -> None:
    with machine(library, tmp_path, HEALTHY | {"gpu1.mig": "1"}) as asked:
        look = asked.sampled()
    assert [(gpu.index, gpu.uuid) for gpu in look.gpus] == [(0, "GPU-aaaa"), (1, "MIG-1-0"), (1, "MIG-1-1")]
    assert look.gpus[1].name == "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    assert look.gpus[1].memory_total_bytes == 85_899_345_920 // 8
    assert (look.newest(1).utilisation_percent, look.newest(1).temperature_c) == (None, 61.0)


def test_a_gpu_that_was_lost_before_we_came_is_said_beside_the_others(library: Path, tmp_path: Path) -> None:
    with machine(library, tmp_path, HEALTHY | {"gpu1.handle": "!15"}) as asked:
        look = asked.sampled()
    assert [gpu.index for gpu in look.gpus] == [0]
    assert look.note == "the NVIDIA driver also counts GPU 1, but cannot reach it"


@pytest.mark.parametrize(
    ("values", "note"),
    [
        ({"count": "0"}, "the NVIDIA driver shows no GPU to this user"),
        ({"init": "9"}, "the NVIDIA driver is installed but not loaded"),
        ({"init": "4"}, "the NVIDIA driver does not permit this user to query its GPUs"),
        ({"init": "18"}, "the NVIDIA driver was updated while loaded: reboot"),
        ({"init": "999"}, "the NVIDIA driver could not be queried: "),
    ],
)
def test_a_driver_that_has_nothing_to_tell_says_why(
    values: dict[str, str], note: str, library: Path, tmp_path: Path
) -> None:
    with machine(library, tmp_path, HEALTHY | values) as asked:
        look = asked.wait_until(lambda look: look.note != "")
    assert look.note.startswith(note)
    assert look.gpus == ()


def test_a_machine_without_a_driver(tmp_path: Path) -> None:
    with machine(None, tmp_path, {}) as asked:
        look = asked.wait_until(lambda look: look.note != "")
    assert look.note == "there is no NVIDIA driver (libnvidia-ml.so.1 was not found)"
    assert look.gpus == ()


def test_the_gpus_of_a_run_come_with_their_ranks(library: Path, tmp_path: Path) -> None:
    with machine(library, tmp_path, HEALTHY, ask="record") as asked:
        found = asked.wait_until(lambda look: bool(look.gpus))
        command = (sys.executable, "-c", "print('ready', flush=True); input()")
        environment = {"CUDA_VISIBLE_DEVICES": "GPU-bbbb"}
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
            assert rank.stdout is not None
            rank.stdout.readline()
            named = asked.wait_until(lambda look: look.gpus[1].ranks == (3,), words=f"3 {rank.pid}")
            rank.kill()
    assert [gpu.ranks for gpu in found.gpus] == [(), ()]
    assert [gpu.ranks for gpu in named.gpus] == [(), (3,)]
    assert found.note == "complete"
    with machine(None, tmp_path, {}, ask="record") as asked:
        none = asked.wait_until(lambda look: "driver" in look.note)
    assert none.note == "absent: there is no NVIDIA driver (libnvidia-ml.so.1 was not found)"
