"""A job that hangs now, started by plain torchrun: who is found, what is said, and that nothing happens to the job."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ddpdoctor.autopsy.dead_job import AutopsyRequest
from ddpdoctor.autopsy.live_job import Seen, live_autopsy, record_of
from ddpdoctor.cli.main import main
from ddpdoctor.diagnosis.live.stacks import parted_stacks
from ddpdoctor.errors import ExitCode, UsageError
from ddpdoctor.finding import Frame
from ddpdoctor.launch.running_ranks import RunningRank
from ddpdoctor.monitor.processes import py_spy
from ddpdoctor.monitor.processes.py_spy import Look
from tests.autopsy.hanging import hanging
from tests.autopsy.live_benchmark import is_right
from tests.autopsy.live_cases import HANGS

C10D = "/opt/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
AUTOGRAD = "/opt/lib/python3.11/site-packages/torch/autograd/graph.py"


def at(line: int, *inner: tuple[str, str]) -> tuple[Frame, ...]:
    """A stack whose user's line is ``line``."""
    return (*(Frame(file, 1, function) for file, function in inner), Frame("/job/train.py", line, "main"))


def seen(*stacks: tuple[Frame, ...], moving: tuple[int, ...] = (), world: int = 0) -> list[Seen]:
    return [
        Seen(RunningRank(rank=rank, pid=rank + 1, world_size=world), Look(frames=stack, moved=rank in moving))
        for rank, stack in enumerate(stacks)
    ]


BARRIER = at(9, (C10D, "barrier"))
BACKWARD = at(8, (AUTOGRAD, "_engine_run_backward"))


def test_one_rank_outside_is_the_one_that_the_others_wait_for() -> None:
    parted = parted_stacks(record_of(seen(BARRIER, BARRIER, at(5))))
    assert parted is not None
    divergence, trouble, doubt = parted
    assert (divergence.culprit, trouble, doubt) == (2, "hang", "")


def test_a_rank_at_work_leaves_a_doubt() -> None:
    parted = parted_stacks(record_of(seen(BARRIER, at(5), moving=(1,))))
    assert parted is not None and "busy" in parted[2]


def test_a_backward_that_computes_is_no_wait() -> None:
    assert parted_stacks(record_of(seen(BACKWARD, BACKWARD, moving=(0, 1)))) is None
    parted = parted_stacks(record_of(seen(BACKWARD, BACKWARD, at(5))))
    assert parted is not None and parted[0].culprit == 2


def test_three_ranks_outvote_the_one_in_another_collective() -> None:
    parted = parted_stacks(record_of(seen(BARRIER, at(7, (C10D, "all_reduce")), BARRIER)))
    assert parted is not None
    assert (parted[0].culprit, parted[1]) == (1, "rank-branch")


def test_two_ranks_in_two_collectives_are_both_told() -> None:
    parted = parted_stacks(record_of(seen(BARRIER, at(7, (C10D, "all_reduce")))))
    assert parted is not None and parted[0].culprit is None and len(parted[0].turns) == 2


def test_all_in_one_call_with_ranks_elsewhere_is_no_proof() -> None:
    parted = parted_stacks(record_of(seen(BARRIER, BARRIER, world=4)))
    assert parted is not None and "2 more ranks" in parted[2]


def test_sixty_three_alike_read_as_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpdoctor.autopsy.live_job.look", lambda pids, *, native: seen(*[BARRIER] * 63, at(5)))
    assert main(["autopsy", "--live"]) == ExitCode.FINDINGS
    shown = capsys.readouterr().out
    assert "rank 63 is stuck at train.py:5 while ranks 0-62 wait in barrier at train.py:9" in " ".join(shown.split())
    assert len(shown.splitlines()) < 60


def test_ranks_that_all_work_are_said_to_work_and_nothing_is_concluded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpdoctor.autopsy.live_job.look", lambda pids, *, native: seen(at(5), at(5), moving=(0, 1)))
    examination = live_autopsy(AutopsyRequest(paths=()), (), ())
    assert examination.exit_code is ExitCode.INCONCLUSIVE
    assert examination.notes[-1] == "ranks 0 and 1 are at train.py:5 in main"


def test_without_py_spy_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError) as raised:
        py_spy.look_at([os.getpid()], ["/"])
    assert "ddpdoctor[live]" in raised.value.hint


def test_where_the_kernel_refuses_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = tmp_path / "py-spy"
    refusing.write_text("#!/bin/sh\necho 'Error: Permission denied (os error 13)' >&2\nexit 1\n")
    refusing.chmod(refusing.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setattr(py_spy, "find_py_spy", lambda: str(refusing))
    monkeypatch.setattr(py_spy, "BETWEEN_S", 0.0)
    (look,) = py_spy.look_at([os.getpid()], ["/"])
    assert "SYS_PTRACE" in look.problem


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--live", "999999999"], "there is no process"),
        (["--live", "train.py"], "is not a pid"),
        (["--hosts", "a", "x.log"], "`--hosts` goes with `--live`"),
        (["--native", "x.log"], "`--native` goes with `--live`"),
        (["--live", str(os.getpid())], "are ranks"),
    ],
)
def test_wrong_usage_is_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autopsy", *words]) == ExitCode.ERROR
    assert sentence in capsys.readouterr().err


def test_several_hosts_are_asked_over_ssh_and_one_that_is_down_costs_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, (name, stack) in enumerate((("node1", BARRIER), ("node2", at(5)))):
        one = Seen(RunningRank(rank=rank, pid=1, world_size=3, host=name), Look(frames=stack))
        (tmp_path / name).write_bytes(msgspec.json.encode([one]))
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\ncd "{tmp_path}"\nfor word; do [ -f "$word" ] && exec cat "$word"; done\nexit 255\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    examination = live_autopsy(AutopsyRequest(paths=()), (), ("node1", "node2", "node3"))
    assert examination.findings[0].ranks == (1,)
    assert "node3 did not answer" in examination.notes[0]
    assert "2 of 3 ranks were examined" in examination.notes[1]


@pytest.mark.parametrize("job", HANGS[:1], ids=lambda job: job.name)
def test_a_real_job_is_explained_and_goes_on(job: object, tmp_path: Path) -> None:
    case = next(hang for hang in HANGS if hang is job)
    with hanging(case, tmp_path) as launcher:
        command = (sys.executable, "-m", "ddpdoctor", "autopsy", "--live", str(launcher), "--output-format", "json")
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == ExitCode.FINDINGS, done.stderr
        examination = live_autopsy(AutopsyRequest(paths=()), (launcher,), ())
        assert subprocess.run(("kill", "-0", str(launcher))).returncode == 0
    (cause,) = [finding for finding in examination.findings if finding.role == "cause"]
    assert is_right(case, cause)
    report = json.loads(done.stdout)
    assert report["findings"][0]["ranks"] == [case.culprit]
    assert report["autopsy"]["processes"] == 3
