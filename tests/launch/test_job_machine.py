"""What is known of the machines of a job before it is rehearsed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddpdoctor.launch.command_line import read_launch_line
from ddpdoctor.launch.environment import chooses_threads
from ddpdoctor.launch.request import Launch, RehearsalRequest
from ddpdoctor.monitor.rehearsal import job_machine, usable_cores
from ddpdoctor.record.streams.setup import JobMachine

STATED = JobMachine(device_memory_bytes=80 << 30, cores=64, ranks_per_node=8)


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("torchrun --nproc-per-node 4 train.py", 4),
        ("torchrun --nproc-per-node 4 --nnodes 2:3 train.py", 4),
        ("torchrun --nproc-per-node gpu train.py", 8),
        ("accelerate launch --num-processes 6 --num-machines 3 train.py", 2),
        ("accelerate launch train.py", 8),
        ("python train.py", 8),
    ],
)
def test_the_command_says_how_many_ranks_a_node_has_or_else_the_project(command: str, ranks: int) -> None:
    launch = read_launch_line(command.split(), {"PATH": "/nowhere"}).launch
    request = RehearsalRequest(script=Path("/job/train.py"), launch=launch, machine=STATED)
    machine = job_machine(request, "cpu")
    assert (machine.ranks_per_node, machine.cores, machine.device_memory_bytes) == (ranks, 64, 80 << 30)


def test_a_rehearsal_on_real_gpus_runs_where_the_job_does() -> None:
    request = RehearsalRequest(script=Path("/job/train.py"))
    assert job_machine(request, "cuda") == JobMachine(cores=usable_cores(), may_use_gpus=True)
    assert job_machine(request, "stand-in") == JobMachine(may_use_gpus=True)
    assert job_machine(request, "cpu") == JobMachine()


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "90000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu.max": "99900000 100000\n"}, None),
        ({"cpu.max": "?\n"}, None),
    ],
)
def test_a_containers_share_of_the_cores_counts(files: dict[str, str], cores: int | None, tmp_path: Path) -> None:
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert usable_cores(str(tmp_path)) == (cores or len(os.sched_getaffinity(0)))


def test_threads_are_chosen_where_the_shell_or_the_command_sets_them() -> None:
    assert chooses_threads({"OMP_NUM_THREADS": "4"}, Launch())
    assert chooses_threads({}, Launch(environment={"OMP_NUM_THREADS": "4"}))
    assert not chooses_threads({"OMP_NUM_THREADS": "4"}, Launch(without=("OMP_NUM_THREADS",)))
    assert not chooses_threads({}, Launch())
