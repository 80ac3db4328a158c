"""Real jobs on two ranks under ``profile``: the verdict on each bundled example, and who a live hang is laid to."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from ddpdoctor.monitor.snapshot import Snapshot
from ddpdoctor.profile.watch import RunSource, live_source
from tests.jobs_of_tests import kill_marked, marked
from tests.monitor.trace_format import violations

EXAMPLES = Path(__file__).parents[2] / "examples"
MAIN = (sys.executable, "-m", "ddpdoctor")
NAMED_WITHIN_S = 40
"""It takes 4 s on a machine that has nothing else to do."""
Started = list["subprocess.Popen[bytes]"]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    processes: Started = []
    yield processes
    kill_marked(tmp_path)
    for popen in processes:
        popen.communicate()


KEPT_MEMORY = dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), "1073741824")
"""Without them one of two equal ranks may take thousands of page faults a step, and be 30% late, by its heap alone."""


def _start(started: Started, directory: Path, *words: str, **variables: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        words,
        cwd=directory,
        env={
            **marked(os.environ, directory),
            "XDG_STATE_HOME": str(directory / "state"),
            "OMP_NUM_THREADS": "1",
            **variables,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    started.append(process)
    return process


def _until(stream: IO[bytes] | None, words: str) -> list[tuple[float, str]]:
    """The lines of a stream, each with the time at which it came, up to the first that holds the words."""
    assert stream is not None
    lines = []
    for line in stream:
        lines.append((time.monotonic(), line.decode()))
        if words in lines[-1][1]:
            return lines
    raise AssertionError(f"{words!r} never came: {lines}")


def test_the_lines_name_the_culprit_of_a_hang_soon(tmp_path: Path, started: Started) -> None:
    code = (EXAMPLES / "rank_divergent_hang.py").read_text()
    script = tmp_path / "train.py"
    call = "evaluate(model, test_loader)"
    assert call in code
    # Rank 0 says when it goes where rank 1 will not come; it trains for a while before.
    script.write_text(code.replace(call, f"(print('goes alone', flush=True), {call})[1]"))
    process = _start(started, tmp_path, *MAIN, "profile", "--no-tui", str(script))
    hung_at = _until(process.stdout, "goes alone")[-1][0]
    told = _until(process.stderr, "do: ")
    stalled = next(number for number, (_, line) in enumerate(told) if "STALLED" in line)
    at, line = told[stalled]
    assert "rank 0 waits in reduce at train.py:46, which rank 1 has not called" in line
    assert told[stalled + 1][1].startswith("ddpdoctor:   culprit: rank 0 waits in reduce at train.py:46")
    assert at - hung_at < NAMED_WITHIN_S
    process.send_signal(signal.SIGINT)
    _until(process.stderr, "SIGINT forwarded to the job")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert b"BROKEN: rank 0 waits in reduce" in err
    # torch waits inside of a wrapper of ours, which is nothing of the user's.
    assert b"seen in the run" in err and b"collectives.py" not in err, err.decode()
    assert process.returncode in (1, 128 + signal.SIGKILL)


def test_a_call_that_ends_its_process_at_once_is_named(tmp_path: Path, started: Started) -> None:
    script = Path(__file__).with_name("aborted.py")
    process = _start(started, tmp_path, *MAIN, "profile", "--no-tui", "--output-format", "json", str(script))
    out, err = process.communicate(timeout=200)
    read = json.loads(out)
    assert read["verdict"]["code"] == "DDP301", err.decode()
    # On a loaded machine the launcher may kill rank 0 before it has said where it was.
    assert re.fullmatch(
        r"rank 1 died inside all_reduce \(4 bytes\) at aborted.py:16, while rank 0 was "
        r"(in backward at aborted.py:13|elsewhere) and has not called it",
        read["verdict"]["text"],
    )
    assert "DDP703" not in {finding["code"] for finding in read["findings"]}


def test_a_second_terminal_attaches_to_a_job_of_plain_torchrun_and_leaves_it_alone(
    tmp_path: Path, started: Started
) -> None:
    exports = subprocess.run((*MAIN, "profile", "--env", "--run-dir", "run dir"), cwd=tmp_path, capture_output=True)
    variables = dict(shlex.split(line)[1].split("=", 1) for line in exports.stdout.decode().splitlines())
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    job = _start(started, tmp_path, *torchrun, str(EXAMPLES / "straggler.py"), "--epochs", "1000", **variables)
    _until(job.stdout, "epoch 0")
    attached = _start(started, tmp_path, *MAIN, "profile", "--no-tui", "--run-dir", "run dir")
    told = _until(attached.stderr, "steps/s")
    assert "attached to " in told[0][1]
    # Less than 10 s of steps are no proof where other work has the cores: the job runs at 8 to 12 steps a second.
    while not re.search(r"step (1[5-9]|[2-9]\d|\d{3,})\d,", told[-1][1]):
        told = _until(attached.stderr, "steps/s")
    attached.send_signal(signal.SIGUSR1)
    _until(attached.stderr, "SIGUSR1 was not forwarded: the job was not started here")
    attached.send_signal(signal.SIGSTOP)
    attached.send_signal(signal.SIGCONT)
    attached.send_signal(signal.SIGINT)
    out, err = attached.communicate(timeout=60)
    assert b"detached; the job continues" in err
    assert out.startswith(b"SLOW: rank 1 keeps rank 0 waiting for "), out.decode()
    reached = _until(job.stdout, "epoch ")[-1][1]
    _until(job.stdout, "epoch ")
    assert job.poll() is None, reached
    kill_marked(tmp_path)
    job.communicate()
    report = subprocess.run((*MAIN, "report", "run dir"), cwd=tmp_path, capture_output=True, timeout=60)
    assert _steps_in(report.stdout) > _steps_in(out), "what came after the detaching is in the report"


def _steps_in(report: bytes) -> int:
    found = re.search(rb"([\d,]+)\s+steps", report)
    assert found is not None, report.decode()
    return int(found[1].replace(b",", b""))


@pytest.mark.alone
@pytest.mark.parametrize(
    ("name", "epochs", "first_line"),
    [
        ("healthy", 2, "HEALTHY: "),
        ("slow_loader", 1, "SLOW: training waits for data for "),
        ("comm_bound", 1, "SLOW: backward waits for gradient transfer for "),
        ("straggler", 1, "SLOW: rank 1 keeps rank 0 waiting for "),
    ],
)
def test_the_report_on_an_example_begins_with_its_verdict(
    name: str, epochs: int, first_line: str, tmp_path: Path, started: Started
) -> None:
    script = EXAMPLES / f"{name}.py"
    options = ("--no-tui", "-o", "report.txt", "--export", "trace=trace.json.gz")
    process = _start(started, tmp_path, *MAIN, "profile", str(script), "--epochs", str(epochs), *options, **KEPT_MEMORY)
    out, err = process.communicate(timeout=200)
    assert out.startswith(b"epoch 0: "), err.decode()
    text = (tmp_path / "report.txt").read_text()
    assert text.startswith(first_line), text
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    # A rank without a step: the report says which part of the observation failed, or what could not be read.
    assert {event["pid"] for event in trace["traceEvents"] if event["ph"] == "X"} == {0, 1}, text + err.decode()
    assert violations(trace) == []
    again = _start(started, tmp_path, *MAIN, "report")
    # A report in a file ends with a seal, by which it is known as ours.
    assert again.communicate(timeout=60)[0].decode() == text.partition("[ddpdoctor ")[0].rstrip() + "\n"
    as_json = _start(started, tmp_path, *MAIN, "report", "--output-format", "json")
    read = json.loads(as_json.communicate(timeout=60)[0])
    assert read["verdict"]["state"] == first_line.partition(":")[0].lower()
    for rank in read["ranks"]:
        assert sum(rank["phases_ms"].values()) == pytest.approx(rank["step_ms"]["p50"], rel=0.6)
    (directory,) = (tmp_path / "state" / "ddpdoctor" / "runs").iterdir()
    assert _shown_after_the_end(directory).verdict.text == read["verdict"]["text"]


def _shown_after_the_end(directory: Path) -> Snapshot:
    """What a screen shows that stays open: of a job this short no warning held for as long as one takes to appear."""
    source = live_source(directory)
    try:
        source.snapshot()
        shown = _until_due(source)
        course = shown.history
        assert _until_due(source).history == course, "the course of a job that has ended stands still"
        return shown
    finally:
        source.close()


def _until_due(source: RunSource) -> Snapshot:
    """The snapshot of the next look."""
    before = source.snapshot()
    while (shown := source.snapshot()) is before:
        time.sleep(0.05)
    return shown
