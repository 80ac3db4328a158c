"""The first cause in logs of failing jobs, and in hand-written lines of launchers, schedulers and NCCL."""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path

import pytest

from ddpdoctor.autopsy.dead_job import AutopsyRequest, autopsy
from ddpdoctor.errors import ExitCode
from ddpdoctor.examination import Examination
from ddpdoctor.finding import Finding
from tests.autopsy.judge import LOGS, expected_of_own, judge

OWN_LOGS = sorted(LOGS.glob("*.log.gz"))
WATCHDOG = (
    "[rank{rank}]:[E1120 20:17:{second:02}.000 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum={number}, OpType={kind}, NumelIn=1024, NumelOut=1024, Timeout(ms)=600000) ran "
    "for 600029 milliseconds before timing out.\n"
)
ENQUEUED = (
    "[rank{rank}]:[E1120 20:17:50.000 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Timeout "
    "at NCCL work: {number}, last enqueued NCCL work: {last}, last completed NCCL work: {done}.\n"
)
LOST = (
    "{mark}Traceback (most recent call last):\n"
    '{mark}  File "/home/user/train.py", line 91, in <module>\n'
    "{mark}    loss.backward()\n"
    "{mark}RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.7]:4242\n"
)
RAISED = (
    "{mark}Traceback (most recent call last):\n"
    '{mark}  File "/home/user/train.py", line 88, in <module>\n'
    "{mark}    main()\n"
    '{mark}  File "/home/user/data.py", line 12, in main\n'
    "{mark}    return self.labels[name]\n"
    "{mark}           ~~~~~~~~~~~^^^^^^\n"
    "{mark}KeyError: 'cat'\n"
)


def examined(*paths: Path) -> Examination:
    return autopsy(AutopsyRequest(paths=tuple(map(str, paths))))


def cause_of(tmp_path: Path, text: str, name: str = "job.log") -> Finding:
    path = tmp_path / name
    path.write_text(text)
    (cause,) = [finding for finding in examined(path).findings if finding.role == "cause"]
    return cause


@pytest.mark.parametrize("path", OWN_LOGS, ids=lambda path: path.name.removesuffix(".log.gz"))
def test_the_first_cause_of_a_recorded_log_is_right(path: Path) -> None:
    expected = expected_of_own(path)
    assert expected is not None
    judged = judge(path, expected)
    assert judged.right, judged


def test_there_are_recorded_logs_of_other_versions() -> None:
    assert len(OWN_LOGS) >= 60
    assert len({path.name.partition("_")[0] for path in OWN_LOGS}) >= 2


@pytest.mark.parametrize(
    "mark", ["[rank{}]: ", "[default{}]:", "{}: ", "[1,{}]<stderr>:", "2026-11-20T20:17:56.123456Z stderr F [rank{}]: "]
)
def test_the_rank_is_read_off_the_prefix_of_any_launcher(mark: str, tmp_path: Path) -> None:
    first, second = mark.format(3), mark.format(0)
    raised, lost = RAISED.format(mark=first).splitlines(), LOST.format(mark=second).splitlines()
    mixed = [line for pair in zip_longest(raised, lost, fillvalue=second) for line in pair]
    cause = cause_of(tmp_path, "\n".join(mixed) + "\n")
    assert (cause.code, cause.ranks) == ("DDP706", (3,))
    assert cause.location is not None and (cause.location.file, cause.location.line) == ("/home/user/data.py", 12)


def test_the_echo_is_told_after_the_cause_however_early_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text(LOST.format(mark="[rank0]: ") + RAISED.format(mark="[rank1]: ") + LOST.format(mark="[rank2]: "))
    examination = examined(path)
    assert [(one.role, one.code, one.ranks) for one in examination.findings] == [
        ("cause", "DDP706", (1,)),
        ("echo", "DDP306", (0, 2)),
    ]
    assert examination.exit_code is ExitCode.FINDINGS


def test_per_rank_files_of_torchrun_and_their_error_file_are_one_job(tmp_path: Path) -> None:
    for rank, text in ((0, LOST), (1, "")):
        directory = tmp_path / "none_x" / "attempt_0" / str(rank)
        directory.mkdir(parents=True)
        (directory / "stderr.log").write_text(text.format(mark="") or "step 1\n")
    (tmp_path / "none_x/attempt_0/1/error.json").write_text(
        '{"message": {"message": "KeyError: \'cat\'", "extraInfo": {"py_callstack": '
        '"Traceback (most recent call last):\\n  File \\"/home/user/data.py\\", line 12, in main\\n    x\\n'
        'KeyError: \'cat\'\\n", "timestamp": "1795205936"}}}'
    )
    cause, echo = examined(tmp_path).findings
    assert (cause.code, cause.ranks, echo.code, echo.ranks) == ("DDP706", (1,), "DDP306", (0,))


def test_the_rank_that_gave_up_on_nothing_is_the_one_that_did_not_come(tmp_path: Path) -> None:
    text = "".join(WATCHDOG.format(rank=rank, second=rank, number=26, kind="ALLREDUCE") for rank in (0, 1, 3))
    cause = cause_of(tmp_path, "[rank2]: RuntimeWarning: Error ignored\n" + text)
    assert (cause.code, cause.ranks) == ("DDP308", (2,))
    assert cause.title == "ranks 0, 1 and 3 timed out in all_reduce #26 after 10 min: rank 2 did not arrive"


def test_the_rank_that_enqueued_less_is_behind(tmp_path: Path) -> None:
    text = "".join(
        WATCHDOG.format(rank=rank, second=rank, number=number, kind=kind)
        + ENQUEUED.format(rank=rank, number=number, last=number, done=number - 1)
        for rank, number, kind in ((0, 12, "ALLREDUCE"), (1, 11, "ALLREDUCE"), (2, 12, "ALLREDUCE"))
    )
    assert cause_of(tmp_path, text).ranks == (1,)


def test_different_operations_at_one_number_are_a_mismatch(tmp_path: Path) -> None:
    kinds = ((0, "BROADCAST"), (1, "ALLREDUCE"))
    text = "".join(WATCHDOG.format(rank=rank, second=rank, number=5, kind=kind) for rank, kind in kinds)
    assert cause_of(tmp_path, text).code == "DDP304"


def test_the_ranks_of_a_desync_report_are_named(tmp_path: Path) -> None:
    report = (
        "\n\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:\n"
        "\t   - [2] finished collective #25, but didn't join collective #26 (count from 1)\n"
    )
    text = WATCHDOG.format(rank=0, second=1, number=26, kind="ALLREDUCE").rstrip("\n") + report
    assert cause_of(tmp_path, text).ranks == (2,)


def test_an_old_watchdog_line_without_numbers_is_understood(tmp_path: Path) -> None:
    line = (
        "[E ProcessGroupNCCL.cpp:566] [Rank 4] Watchdog caught collective operation timeout: "
        "WorkNCCL(OpType=ALLGATHER, Timeout(ms)=1800000) ran for 1802710 milliseconds before timing out.\n"
    )
    cause = cause_of(tmp_path, line)
    assert (cause.code, cause.title) == ("DDP308", "rank 4 timed out in all_gather after 30 min")


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("[1.5] NVRM: Xid (PCI:0000:3b:00): 79, pid=12, GPU has fallen off the bus.\n", "DDP704", "Xid 79"),
        ("[1.5] Out of memory: Killed process 4242 (python) total-vm:1kB\n", "DDP703", "memory had run out"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks\n", "DDP703", "memory"),
        ("srun: error: node17: task 3: Killed\n", "DDP703", "rank 3 was killed by SIGKILL"),
        ("srun: error: node17: tasks 0-3: Exited with exit code 9\n", "DDP306", "exit code 9"),
        (
            "slurmstepd: error: *** JOB 12 ON node1 CANCELLED AT 2026-11-20T20:17:56 DUE TO TIME LIMIT ***\n",
            "DDP703",
            "time limit",
        ),
        ("mpirun noticed that process rank 1 with PID 7 on node n1 exited on signal 11 (Segm\n", "DDP703", "SIGSEGV"),
        ("node3:11:22 [2] transport.cc:1 NCCL WARN Cuda failure 2 'invalid device'\n", "DDP701", "invalid device"),
        ("[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n", "DDP702", "memory"),
        ("Fatal Python error: Segmentation fault\n", "DDP703", "SIGSEGV"),
        ("train.sh: line 3:  4242 Killed                  python train.py\n", "DDP703", "SIGKILL"),
    ],
)
def test_what_the_kernel_a_scheduler_or_nccl_says_is_understood(
    text: str, code: str, words: str, tmp_path: Path
) -> None:
    cause = cause_of(tmp_path, text)
    assert cause.code == code
    assert words in cause.title


def test_a_time_stamp_decides_between_the_logs_of_two_nodes(tmp_path: Path) -> None:
    later = "2026-11-20 20:17:56,000 step\n" + RAISED.format(mark="[rank0]: ")
    other = RAISED.replace("KeyError", "OSError").replace("12", "13")
    earlier = "2026-11-20 20:10:00,000 step\n" + other.format(mark="[rank8]: ")
    (tmp_path / "node1.log").write_text(later)
    (tmp_path / "node2.log").write_text(earlier)
    first = examined(tmp_path).findings[0]
    assert (first.role, first.ranks, first.doubt) == ("cause", (8,), "")


def test_a_log_of_dockers_json_driver_is_read(tmp_path: Path) -> None:
    lines = (RAISED.format(mark="[rank1]: ") + LOST.format(mark="[rank0]: ")).splitlines()
    stamp = "2026-11-20T20:17:56.1Z"
    entries = [{"log": f"{line}\n", "stream": "stderr", "time": stamp} for line in lines]
    wrapped = [json.dumps(one, separators=(",", ":")) for one in entries]
    cause = cause_of(tmp_path, "\n".join(wrapped) + "\n")
    assert (cause.code, cause.ranks) == ("DDP706", (1,))


def test_a_line_like_an_exception_counts_for_the_rank_that_left(tmp_path: Path) -> None:
    said = "2: RuntimeError: CUDA error: an illegal memory access was encountered\n"
    steps = "".join(f"{rank}: step 1\n" for rank in range(4))
    cause = cause_of(tmp_path, f"{steps}{said}srun: error: node1: task 2: Exited with exit code 1\n")
    assert (cause.code, cause.ranks) == ("DDP706", (2,))
    ended = "srun: error: node1: task 2: Exited with exit code 1\nsrun: error: node1: tasks 0-1,3: Terminated\n"
    assert not cause_of(tmp_path, steps + said + ended).doubt
    (tmp_path / "job.log").write_text(steps + said)
    alone = examined(tmp_path / "job.log").findings[0]
    assert (alone.ranks, bool(alone.doubt)) == ((2,), True)


def test_two_failures_whose_order_nobody_knows_are_told_with_a_doubt(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(RAISED.format(mark="[rank0]: "))
    (tmp_path / "b.log").write_text(RAISED.format(mark="[rank1]: ").replace("KeyError", "OSError").replace("12", "13"))
    assert "first" in examined(tmp_path).findings[0].doubt


def test_warnings_alone_are_no_cause_of_death(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text("[rank1]:[W1120 20:16:39.19 reducer.cpp:1529] Warning: find_unused_parameters=True was specified\n")
    examination = examined(path)
    assert (examination.findings, examination.exit_code) == ((), ExitCode.INCONCLUSIVE)
