"""A job that hangs now, started by plain torchrun: who is found, what is said, and that nothing happens to the job."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from ddpdoctor.autopsy.dead_job import AutopsyRequest
from ddpdoctor.autopsy.live_job import Seen, live_autopsy, record_of
from ddpdoctor.cli.main import main
from ddpdoctor.diagnosis.stacks import WAITS, is_at_work, parted_stacks, wait_of
from ddpdoctor.errors import ExitCode, UsageError
from ddpdoctor.examination import Examination
from ddpdoctor.finding import Finding, Frame
from ddpdoctor.launch.processes import RunningRank, running_ranks
from ddpdoctor.monitor.processes import stacks
from ddpdoctor.monitor.processes.stacks import LoaderWorker, Look
from tests.autopsy.hanging import PATIENCE_S, hanging
from tests.autopsy.live_benchmark import is_right
from tests.autopsy.live_cases import HANGS, Hang

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
        stacks.look_at([os.getpid()], ["/"])
    assert "ddpdoctor[live]" in raised.value.hint


def test_where_the_kernel_refuses_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = tmp_path / "py-spy"
    refusing.write_text("#!/bin/sh\necho 'Error: Permission denied (os error 13)' >&2\nexit 1\n")
    refusing.chmod(refusing.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setattr(stacks, "find_py_spy", lambda: str(refusing))
    monkeypatch.setattr(stacks, "BETWEEN_S", 0.0)
    (look,) = stacks.look_at([os.getpid()], ["/"])
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


def explained(job: Hang, pids: tuple[int, ...], fact: str) -> tuple[Examination, Finding]:
    """Look until all ranks stand where the job hangs, and a fact is seen."""
    limit = time.monotonic() + PATIENCE_S
    while time.monotonic() < limit:
        examination = live_autopsy(AutopsyRequest(paths=()), pids, ())
        cause = next((finding for finding in examination.findings if finding.role == "cause"), None)
        if cause is not None and is_right(job, cause) and any(fact in one.text for one in cause.evidence):
            return examination, cause
    raise AssertionError("the job was never explained")


def test_the_pid_of_a_rank_finds_its_siblings_and_a_worker_that_it_waits_for_is_shown(tmp_path: Path) -> None:
    job = next(one for one in HANGS if one.name == "loader")
    with hanging(job, tmp_path, settles_s=0) as launcher:
        ranks = {one.rank: one.pid for one in running_ranks((launcher,))}
        assert sorted(ranks) == [0, 1, 2]
        examination, cause = explained(job, (ranks[2],), f".py:{job.worker_line} in Stuck")
        assert {one.rank: one.pid for one in running_ranks((ranks[job.culprit],))} == ranks
    assert f"the launcher of these ranks is process {launcher}" in examination.notes
    assert examination.autopsy is not None and examination.autopsy.processes == 3
    told = [fact for fact in cause.evidence if "rank 1 waits for its loader's worker" in fact.text]
    assert told and all(fact.stack[0].line == job.worker_line for fact in told)
    assert "worker" in cause.remedy and "timeout" in cause.remedy


def inner(*frames: tuple[str, str]) -> tuple[Frame, ...]:
    return at(5, *((f"/opt/lib/python3.11/{file}", function) for file, function in frames))


@pytest.mark.parametrize(
    ("stack", "what"),
    [
        (inner(("threading.py", "wait"), ("queue.py", "get")), "a queue"),
        (inner(("threading.py", "wait")), "an event or a condition of another thread"),
        (inner(("threading.py", "_wait_for_tstate_lock"), ("threading.py", "join")), "another thread to end"),
        (inner(("subprocess.py", "_try_wait"), ("subprocess.py", "wait")), "a child process"),
        (inner(("socket.py", "readinto"), ("http/client.py", "begin")), "the network"),
        (inner(("site-packages/filelock/_api.py", "acquire")), "a lock in a file"),
        (inner(("threading.py", "wait"), ("concurrent/futures/_base.py", "result")), "a future"),
        (inner(("site-packages/torch/cuda/__init__.py", "synchronize")), "its GPU"),
        (
            inner(
                ("selectors.py", "select"),
                ("multiprocessing/connection.py", "wait"),
                ("multiprocessing/queues.py", "get"),
                ("site-packages/torch/utils/data/dataloader.py", "_try_get_data"),
            ),
            "a worker of its DataLoader",
        ),
        (at(5), ""),
    ],
)
def test_what_a_rank_waits_for_is_told_by_the_library_that_it_is_in(stack: tuple[Frame, ...], what: str) -> None:
    wait = wait_of(stack)
    assert (wait.what if wait else "") == what
    parted = parted_stacks(record_of(seen(BARRIER, BARRIER, stack)))
    assert parted is not None and (f"it waits for {what}" in parted[0].culprit_reason) is bool(what)


def test_each_thing_that_is_waited_for_has_a_remedy_of_its_own() -> None:
    assert len({wait.remedy for wait in WAITS}) == len({wait.what for wait in WAITS}) == len(WAITS)


def test_a_worker_that_waits_for_work_is_not_the_one_that_is_waited_for() -> None:
    loop = ("site-packages/torch/utils/data/_utils/worker.py", "_worker_loop")
    idle = inner(("multiprocessing/connection.py", "poll"), ("multiprocessing/queues.py", "get"), loop)
    at_work = (Frame("/job/data.py", 12, "__getitem__"), *inner(loop))
    assert (is_at_work(idle), is_at_work(at_work)) == (False, True)
    looks = seen(BARRIER, inner(("site-packages/torch/utils/data/dataloader.py", "_get_data")))
    looks[1] = msgspec.structs.replace(looks[1], workers=(LoaderWorker(71, Look(frames=at_work)),))
    (dump,) = [one for one in record_of(looks).stacks if not one.main]
    assert (dump.rank, dump.frames) == (1, at_work)
