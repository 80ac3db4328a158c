"""Logs as other launchers, collectors and loggers write them: the same deaths, with something in front or around."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.traceback import Traceback

from ddpdoctor.autopsy.dead_job import AutopsyRequest, autopsy
from ddpdoctor.examination import Examination
from ddpdoctor.finding import Finding

MEMORY = """Traceback (most recent call last):
  File "/app/train.py", line 210, in <module>
    main()
  File "/app/model.py", line 44, in forward
    x = self.mlp(x)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.""".splitlines()
LOST = """Traceback (most recent call last):
  File "/app/train.py", line 158, in main
    loss.backward()
  File "/usr/lib/python3.10/site-packages/torch/autograd/graph.py", line 825, in _engine_run_backward
    return Variable._execution_engine.run_backward(
RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [172.20.0.3]:33210""".splitlines()
STEPS = [f"step {step} loss 1.{step}" for step in range(4)]


def marked(rank: int) -> list[str]:
    return [f"[rank{rank}]: {line}" for line in (MEMORY if rank == 1 else LOST)]


def in_turns(mark: tuple[str, str]) -> Iterator[str]:
    """Lines of both ranks, one after the other."""
    for lost, memory in zip_longest(STEPS + LOST, STEPS + MEMORY):
        yield from (f"{mark[0]}{lost}",) if lost is not None else ()
        yield from (f"{mark[1]}{memory}",) if memory is not None else ()


def stamped(before: str) -> Iterator[str]:
    for second, line in enumerate(marked(1) + marked(0)):
        yield before.format(second=second) + line


def as_objects(text: str, exception: str) -> Iterator[str]:
    """What structlog and its like write: one object a line, the whole traceback in one field."""
    for rank, lines in ((1, MEMORY), (0, LOST)):
        yield json.dumps(
            {"time": f"2026-03-01T10:00:0{3 - rank}.5Z", "rank": rank, text: "failed", exception: "\n".join(lines)}
        )


FORMS: dict[str, tuple[list[str], tuple[int, ...], str]] = {
    "docker-compose": (list(in_turns(("trainer-0  | ", "trainer-1  | "))), (), "trainer-1"),
    "kubectl": (list(in_turns(("[pod/job-0/pytorch] ", "[pod/job-1/pytorch] "))), (), "job-1"),
    "srun": (list(in_turns(("0: ", "1: "))), (1,), ""),
    "ray": (list(in_turns(("(TrainWorker pid=7, ip=10.0.0.1) ", "(TrainWorker pid=8, ip=10.0.0.2) "))), (), "10.0.0.2"),
    "ts": (list(stamped("Nov 22 13:00:{second:02} ")), (1,), ""),
    "syslog": (list(stamped("Mar  2 13:00:{second:02} node7 torchrun[4711]: ")), (1,), "node7"),
    "structlog": (list(as_objects("event", "exception")), (1,), ""),
    "python-json-logger": (list(as_objects("message", "exc_info")), (1,), ""),
    "journald": ([json.dumps({"MESSAGE": line, "_HOSTNAME": "n7"}) for line in marked(1) + marked(0)], (1,), "n7"),
    "cloud": ([json.dumps({"textPayload": line, "severity": "ERROR"}) for line in marked(1) + marked(0)], (1,), ""),
    "line-ends-of-windows": ([f"{line}\r" for line in marked(1) + marked(0)], (1,), ""),
}  # fmt: skip


def examined(tmp_path: Path, text: str) -> Examination:
    (tmp_path / "job.log").write_text(text)
    return autopsy(AutopsyRequest(paths=(str(tmp_path / "job.log"),)))


def cause_of(examination: Examination) -> Finding:
    return next(finding for finding in examination.findings if finding.role == "cause")


@pytest.mark.parametrize("form", FORMS)
def test_what_a_collector_writes_around_a_line_hides_nothing(form: str, tmp_path: Path) -> None:
    lines, ranks, host = FORMS[form]
    examination = examined(tmp_path, "\n".join(lines) + "\n")
    cause = cause_of(examination)
    assert (cause.code, cause.ranks, cause.doubt) == ("DDP702", ranks, "")
    assert cause.location is not None and cause.location.line == 44
    assert host in cause.evidence[0].text
    assert [finding.code for finding in examination.findings if finding.role == "echo"] == ["DDP306"]


FAILS = """
def step():
    raise RuntimeError(
        "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates "
        "that your module has parameters that were not used in producing loss.\\n"
        "Parameter indices which did not receive grad for rank 1: 2 3"
    )


def main():
    step()
"""


def boxed(script: Path, width: int, *, show_locals: bool) -> str:
    """The traceback of a script of its own as rich draws it."""
    script.write_text(FAILS)
    names: dict[str, Any] = {}
    exec(compile(FAILS, script, "exec"), names)
    drawn = io.StringIO()
    try:
        names["main"]()
    except RuntimeError as error:
        own = error.__traceback__ and error.__traceback__.tb_next
        shown = Traceback.from_exception(type(error), error, own, show_locals=show_locals)
        Console(file=drawn, width=width, force_terminal=False).print(shown)
    return drawn.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 140])
@pytest.mark.parametrize("show_locals", [False, True])
def test_a_traceback_in_a_box_of_rich_is_read_with_its_wrapped_message(
    width: int, show_locals: bool, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    text = boxed(script, width, show_locals=show_locals)
    cause = cause_of(examined(tmp_path, "".join(f"[rank1]: {line}\n" for line in text.splitlines())))
    assert (cause.code, cause.ranks) == ("DDP201", (1,))
    assert "indices 2, 3" in cause.title
    assert "before starting a new one. This error indicates" in cause.evidence[0].text
    assert cause.location is not None
    assert (cause.location.file, cause.location.line) == (str(script), 3)


TABLE = """\
Traceback (most recent call last):
  File "/opt/conda/lib/python3.10/site-packages/torch/distributed/launcher/api.py", line 268, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-04-27_17:51:07
  host      : node7
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 5917)
  error_file: <N/A>
============================================================
"""


def test_a_box_without_a_mark_belongs_to_the_rank_that_failed(tmp_path: Path) -> None:
    box = boxed(tmp_path / "train.py", 80, show_locals=False)
    cause = cause_of(examined(tmp_path, f"Epoch 0: 12%|#   | 12/100{box}{TABLE}"))
    assert (cause.code, cause.ranks) == ("DDP201", (1,))
    assert "ChildFailedError" not in cause.title


def test_of_a_group_of_exceptions_its_parts_are_told(tmp_path: Path) -> None:
    text = """\
  + Exception Group Traceback (most recent call last):
  |   File "/app/train.py", line 12, in <module>
  |     asyncio.run(main())
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/app/shards.py", line 7, in load
    |     raise ValueError("shard 3 is corrupt")
    | ValueError: shard 3 is corrupt
    +------------------------------------
"""
    cause = cause_of(examined(tmp_path, "".join(f"[rank2]: {line}\n" for line in text.splitlines())))
    assert (cause.ranks, cause.title) == ((2,), "rank 2 raised ValueError at shards.py:7: shard 3 is corrupt")


def test_stamps_whose_month_has_one_digit_are_stamps(tmp_path: Path) -> None:
    """torch 2.5 and 2.6 write ``E131`` on the 31st of January."""
    lines = [
        f"[rank{rank}]:[E131 16:15:0{rank}.707598872 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=18590, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, "
        f"Timeout(ms)=600000) ran for 60000{rank} milliseconds before timing out."
        for rank in (0, 1, 3)
    ]
    cause = cause_of(examined(tmp_path, "[rank2]: step 7\n" + "\n".join(lines) + "\n"))
    assert (cause.code, cause.ranks) == ("DDP308", (2,))
    assert cause.evidence[0].numbers["sequence"] == 18590


def test_what_python_goes_on_after_ends_nothing(tmp_path: Path) -> None:
    ignored = (
        "Exception ignored in: <function _Iterator.__del__ at 0x7f8a1c71e5e0>\n"
        "Traceback (most recent call last):\n"
        '  File "/env/torch/utils/data/dataloader.py", line 1324, in __del__\n'
        "    self._shutdown_workers()\n"
        "AssertionError: can only test a child process\n"
    )
    for said in (ignored, ignored.replace("ignored in: ", "ignored on calling ctypes callback function "), 2 * ignored):
        assert not examined(tmp_path, said + "epoch 1: loss 0.4\n").findings
        assert not examined(tmp_path, "epoch 1:  3%|x| 1/29 " + said + "epoch 1: loss 0.4\n").findings
        last = (
            said
            + "Traceback (most recent call last):\n"
            + '  File "train.py", line 3, in <module>\n    main()\nKeyError: 7\n'
        )
        assert "KeyError" in cause_of(examined(tmp_path, last)).title


def _table(*rows: tuple[int, str, str, str]) -> str:
    """What torchrun prints of ranks: each with its time, its exit code and its host; the first is the root cause."""
    head = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n" + "=" * 60 + "\ntrain.py FAILED\n"
    lines = []
    for rank, at, code, host in (*rows[1:], rows[0]):
        lines.append("Root Cause (first observed failure):" if rank == rows[0][0] else "-" * 60)
        lines += [f"[{rank}]:", f"  time      : 2026-07-21_05:{at}", f"  host      : {host}"]
        lines += [f"  rank      : {rank} (local_rank: {rank})", f"  exitcode  : {code} (pid: {2000 + rank})"]
        lines += ["  error_file: <N/A>", "  traceback : To enable traceback see: https://pytorch.org/docs"]
    return head + "\n".join(lines) + "\n" + "=" * 60 + "\n"


@pytest.mark.parametrize(
    ("rows", "code", "ranks"),
    [
        ([(1, "44:10", "1", "a"), (0, "44:41", "-9", "a"), (2, "44:41", "-15", "a")], "DDP306", (1,)),
        ([(1, "44:10", "-11", "a"), (0, "44:40", "-9", "a")], "DDP703", (1,)),
        ([(0, "44:10", "-9", "a"), (1, "44:12", "1", "a")], "DDP703", (0,)),
        ([(0, "44:10", "-9", "a"), (1, "44:41", "-9", "a")], "DDP703", (0,)),
        ([(1, "44:10", "1", "a"), (0, "44:10", "-9", "a")], "DDP703", (0,)),
    ],
)
def test_who_is_killed_after_another_rank_had_failed_was_ended_by_the_launcher(
    rows: list[tuple[int, str, str, str]], code: str, ranks: tuple[int, ...], tmp_path: Path
) -> None:
    cause = cause_of(examined(tmp_path, _table(*rows)))
    assert (cause.code, cause.ranks) == (code, ranks)


def test_deepspeed_and_lightning_tell_how_a_rank_ended(tmp_path: Path) -> None:
    deepspeed = (
        "[2026-01-02 07:27:05,999] [INFO] [launch.py:315:sigkill_handler] Killing subprocess 94984\n"
        "[2026-01-02 07:27:35,999] [ERROR] [launch.py:321:sigkill_handler] ['python', '-u', 'train.py', "
        "'--local_rank=1'] exits with return code = {code}\n"
    )
    killed = cause_of(examined(tmp_path, deepspeed.format(code=-9)))
    # The command that it prints is that of its last rank, whichever failed.
    assert (killed.code, killed.ranks) == ("DDP703", ())
    assert "SIGKILL" in killed.title
    raised = cause_of(examined(tmp_path, "\n".join(MEMORY) + "\n" + deepspeed.format(code=1)))
    assert raised.code == "DDP702"
    lightning = "[rank: 3] Child process with PID 3211 terminated with code 1. Forcefully terminating all other\n"
    assert cause_of(examined(tmp_path, lightning + "\n".join(MEMORY) + "\n")).ranks == (3,)
