"""What is said of a job that tells nothing, or of which part is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ddpdoctor.launch.environment import observed
from ddpdoctor.monitor.processes.why_no_data import (
    COMPLAINS_AFTER_NS,
    LONG_WITHOUT_A_GROUP_NS,
    Silence,
    missing_ranks,
    two_runs,
)
from ddpdoctor.record import events
from ddpdoctor.record.assembly.ranks import RankBook
from ddpdoctor.record.model import Job, Rank, RunRecord

SLEEPS = "import time; time.sleep(600)"


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def _complaint(
    processes: list[subprocess.Popen[bytes]],
    environment: dict[str, str],
    *options: str,
    program: str = "mpirun",
    script: str = "",
) -> str:
    process = subprocess.Popen([sys.executable, *options, "-c", SLEEPS], env=environment)
    processes.append(process)
    silence, record = Silence(process.pid, (program, "train.py"), script), RunRecord(job=Job(kind="run"))
    deadline = time.monotonic() + 60
    while not (said := silence.reason(RankBook(), record, ended=True)).startswith((program, "Python")):
        silence.look(RankBook(), time.time_ns())
        if time.monotonic() > deadline:
            return said
    return said


def test_a_launcher_that_drops_a_variable_is_told_which_and_how_to_pass_it_on(
    processes: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    whole = dict(os.environ) | observed(tmp_path, os.environ)
    without_run = {name: value for name, value in whole.items() if name != "DDPDOCTOR_RUN"}
    assert _complaint(processes, without_run) == (
        "mpirun starts Python without the variable DDPDOCTOR_RUN, so nothing is measured: pass on DDPDOCTOR_RUN and "
        "PYTHONPATH, as in `mpirun -x DDPDOCTOR_RUN -x PYTHONPATH` (Open MPI) or `-genvlist DDPDOCTOR_RUN,PYTHONPATH` "
        "(MPICH)"
    )
    assert "mpirun changes the variable PYTHONPATH" in _complaint(processes, whole | {"PYTHONPATH": "/elsewhere"})
    assert "Python is started with -I, which disables the probe" in _complaint(processes, whole, "-I")


def test_nothing_is_said_of_a_young_job_and_nothing_of_one_that_was_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpdoctor.monitor.processes.why_no_data.has_torch", lambda python: True)
    silence = Silence(None, ("torchrun",))
    young = RunRecord(job=Job(kind="run", started_ns=1, ended_ns=COMPLAINS_AFTER_NS // 2))
    assert silence.reason(RankBook(), young, ended=False) == ""
    assert "torchrun does not pass on the variables DDPDOCTOR_RUN and PYTHONPATH" in silence.reason(
        RankBook(), young, ended=True
    )
    assert Silence(None, ("python3", "train.py")).reason(RankBook(), young, ended=True) == (
        "no process of the job created a process group: it trains without DDP, ended before, or starts its ranks "
        "without "
        "the variables DDPDOCTOR_RUN and PYTHONPATH"
    )
    book = _book((0, 10, 1))
    assert silence.reason(book, young, ended=False) == ""
    assert silence.reason(book, young, ended=True).startswith("no process of the job created a process group")
    finished = tuple(Rank(rank=rank, main_finished=True) for rank in (0, 1))
    alone = msgspec.structs.replace(young, ranks=finished)
    assert silence.reason(book, alone, ended=True).startswith("none of the ranks created a process group: each ran on")
    book.worlds[10] = (1, "gloo")
    assert silence.reason(book, young, ended=True) == "no rank wrapped a model in DistributedDataParallel"


def test_a_python_without_torch_is_told_by_its_exception() -> None:
    book = RankBook()
    book.take(5, events.Process(parent=1, kind="start"))
    book.take(
        5,
        events.Raised(
            time_ns=1,
            type="ModuleNotFoundError",
            message="No module named 'torch'",
            frames=(),
            traceback="",
            communication=False,
        ),
    )
    said = Silence(None, ("python",)).reason(book, RunRecord(job=Job(kind="run")), ended=False)
    assert said == "the job's Python has no torch (No module named 'torch')"


def test_two_runs_in_one_directory_are_told_from_ranks_that_were_started_again() -> None:
    assert two_runs(_book((0, 10, 1), (1, 11, 1), (0, 20, 1), (1, 21, 1))) == ""
    assert two_runs(_book((0, 10, 1), (1, 11, 1), (0, 20, 2))).startswith("another job has started here")


def test_a_process_that_has_its_rank_s_work_done_by_another_is_no_launcher_of_a_further_job() -> None:
    below = _book((0, 10, 1), (1, 11, 1), (0, 20, 10))
    assert two_runs(below) == two_runs(below, at_once=True) == ""
    further = _book((0, 10, 1), (1, 11, 1))
    further.take(20, events.Process(parent=15, owner=10, kind="start"))
    further.take(20, events.World(rank=0, local_rank=0, world_size=2, backend="gloo"))
    assert two_runs(further) == ""


def test_ranks_that_never_reported_are_counted() -> None:
    assert missing_ranks(RunRecord(job=Job(kind="run", world_size=2, ranks_reported=(0, 1)))) == ""
    assert missing_ranks(RunRecord(job=Job(kind="run", world_size=8, ranks_reported=(0, 1)))).startswith("2 of 8 ranks")


def _without_torch(kind: str) -> events.Raised:
    return events.Raised(
        time_ns=1, type=kind, message="No module named 'torch'", frames=(), traceback="", communication=False
    )


def _book(*ranks: tuple[int, int, int]) -> RankBook:
    book = RankBook()
    for rank, pid, parent in ranks:
        book.take(pid, events.Process(parent=parent, kind="start", rank=rank))
    return book


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("import horovod.torch as hvd", "Horovod"),
        ("from horovod import torch as hvd", "Horovod"),
        ("try:\n    import horovod.torch as hvd\nexcept ImportError:\n    hvd = None", ""),
        ("import smdistributed.modelparallel.torch as smp", "SageMaker's model-parallel library"),
        ("from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel", "SageMaker's"),
        ("import smdistributed.dataparallel.torch.torch_smddp", ""),
        ("# import horovod.torch", ""),
        ("import horovod_tools", ""),
    ],
)
def test_a_library_that_reduces_gradients_beside_ddp_is_named_with_what_still_works(
    line: str, named: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import torch\n{line}\n")
    silence, record = Silence(None, ("python", str(script)), str(script)), RunRecord(job=Job(kind="run"))
    said = silence.reason(RankBook(), record, ended=True)
    assert (f"{named}" in said and "autopsy --live" in said) if named else "autopsy" not in said
    assert silence.reason(RankBook(), record, ended=False) == ""


def test_a_launcher_of_another_library_is_known_by_its_name() -> None:
    silence = Silence(None, ("horovodrun", "-np", "2", "sh", "train.sh"))
    assert "Horovod reduces the gradients" in silence.reason(RankBook(), RunRecord(job=Job(kind="run")), ended=True)


def test_another_library_is_named_only_of_a_job_that_has_no_process_group_and_would_have_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import horovod.torch as hvd\n")
    silence = Silence(None, ("torchrun", str(script)), str(script))
    starts, waits = (
        RunRecord(job=Job(kind="run", started_ns=1, ended_ns=1 + age_ns))
        for age_ns in (2 * COMPLAINS_AFTER_NS, LONG_WITHOUT_A_GROUP_NS)
    )
    book = _book((0, 10, 1))
    assert silence.reason(book, starts, ended=False) == ""
    assert silence.reason(book, waits, ended=False).startswith("Horovod reduces the gradients of this script")
    book.take(10, events.World(rank=0, local_rank=0, world_size=1, backend="gloo"))
    assert silence.reason(book, waits, ended=False) == ""
    assert silence.reason(book, waits, ended=True) == "no rank wrapped a model in DistributedDataParallel"
    without = RankBook()
    without.take(5, events.Process(parent=1, kind="start"))
    without.take(
        5,
        events.Raised(
            time_ns=1,
            type="ImportError",
            message="No module named 'torch'",
            frames=(),
            traceback="",
            communication=False,
        ),
    )
    assert silence.reason(without, waits, ended=True).startswith("the job's Python has no torch")


def test_a_launcher_that_drops_a_variable_is_told_so_of_a_script_with_another_library_too(
    processes: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import horovod.torch as hvd\n")
    whole = dict(os.environ) | observed(tmp_path, os.environ)
    without_run = {name: value for name, value in whole.items() if name != "DDPDOCTOR_RUN"}
    said = _complaint(processes, without_run, script=str(script))
    assert said.startswith("mpirun starts Python without the variable DDPDOCTOR_RUN")
