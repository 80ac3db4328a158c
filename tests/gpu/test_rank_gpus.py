from __future__ import annotations

import os

import msgspec
import pytest

from ddpdoctor.monitor.gpus import RankProcess, environment_of, with_ranks
from ddpdoctor.record.streams.measured import Gpu, GpuSample

FOUR = tuple(Gpu(index=index, uuid=f"GPU-{letter}000-{index}", name="A100") for index, letter in enumerate("abcd"))


def holding(gpu: Gpu, *processes: tuple[int, int]) -> Gpu:
    return msgspec.structs.replace(gpu, samples=(GpuSample(taken_at_ns=1, processes=processes),))


def users(gpus: tuple[Gpu, ...], *ranks: RankProcess) -> list[tuple[int, ...]]:
    return [gpu.ranks for gpu in with_ranks(gpus, ranks)]


@pytest.mark.parametrize(
    ("visible", "used"),
    [
        (None, 1),
        ("3,2,0,1", 2),
        ("2, 3", 3),
        ("GPU-d000-3,GPU-b000-1", 1),
        ("GPU-d,GPU-c", 2),
        ("gpu-D,gpu-c", 2),
        ("0,7,1", 0),
        ("0,-1,1", 0),
        ("0,GPU-ffff", 0),
        ("1,1", None),
        ("", None),
        ("NoDevFiles", None),
        ("2", 2),
    ],
)
def test_the_second_rank_of_a_node_uses_what_its_environment_shows(visible: str | None, used: int | None) -> None:
    found = users(FOUR, RankProcess(rank=5, local_rank=1, visible=visible))
    assert found == [(5,) if position == used else () for position in range(4)]


def test_a_rank_of_which_nothing_is_known_is_on_no_gpu() -> None:
    assert users(FOUR, RankProcess(rank=0, local_rank=2, visible="3,1,0")) == [(0,), (), (), ()]
    assert users(FOUR, RankProcess(rank=0)) == [(), (), (), ()]


def test_processes_on_the_gpus_go_before_the_environment() -> None:
    gpus = (holding(FOUR[0], (11, 300), (12, 300)), holding(FOUR[1], (12, 9000)), FOUR[2], FOUR[3])
    told = (RankProcess(rank=0, pid=11, local_rank=3), RankProcess(rank=1, pid=12, local_rank=2))
    assert users(gpus, *told) == [(0,), (1,), (), ()]
    # A rank that holds memory on GPU 0 too is still on the one that its environment names.
    assert users(gpus, RankProcess(rank=1, pid=12, local_rank=0)) == [(1,), (), (), ()]


def test_gpus_of_different_models_are_counted_only_by_bus() -> None:
    mixed = (msgspec.structs.replace(FOUR[0], name="T4"), *FOUR[1:])
    assert users(mixed, RankProcess(rank=0, local_rank=0, order="FASTEST_FIRST")) == [(), (), (), ()]
    assert users(mixed, RankProcess(rank=0, local_rank=0, visible="1")) == [(), (), (), ()]
    assert users(mixed, RankProcess(rank=0, local_rank=0, order="PCI_BUS_ID")) == [(0,), (), (), ()]
    assert users(mixed, RankProcess(rank=0, local_rank=0, visible="GPU-b")) == [(), (0,), (), ()]


def test_mig_instances_are_known_by_uuid_and_by_process_only() -> None:
    parts = (FOUR[0], Gpu(index=1, uuid="MIG-11"), holding(Gpu(index=1, uuid="MIG-12"), (40, 5)))
    assert users(parts, RankProcess(rank=0, local_rank=0, visible="MIG-11")) == [(), (0,), ()]
    assert users(parts, RankProcess(rank=0, local_rank=0, visible="MIG-1")) == [(), (), ()]
    assert users(parts, RankProcess(rank=0, local_rank=0)) == [(), (), ()]
    assert users(parts, RankProcess(rank=0, local_rank=0, pid=40)) == [(), (), (0,)]


def test_several_ranks_on_one_gpu() -> None:
    both = (RankProcess(rank=1, local_rank=1, visible="0"), RankProcess(rank=0, local_rank=0, visible="0"))
    assert users(FOUR, *both) == [(0, 1), (), (), ()]


def test_the_environment_of_a_process_is_read_where_it_may_be() -> None:
    environment = environment_of(os.getpid())
    assert environment is not None
    assert environment["PATH"] == os.environ["PATH"]
    assert environment_of(2**22 + 1) is None
