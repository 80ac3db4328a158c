"""The command of ``--on-hang``: once, for a proved hang alone, bounded in time, and never in the way."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ddpdoctor.cli.live import hang_command, signals
from ddpdoctor.cli.live.hang_command import HELD_NS, OUTPUT_FILE, HangCommand, Outlets, read_command
from ddpdoctor.errors import UsageError
from ddpdoctor.launch.job import LaunchedJob
from ddpdoctor.monitor.snapshot import Snapshot
from ddpdoctor.report import streams
from tests.demo.job import demo_snapshot

S = 1_000_000_000
STARTED_NS = 1_700_000_000 * S
HANGS = demo_snapshot(100 * S, STARTED_NS)
RUNS = demo_snapshot(10 * S, STARTED_NS)


def _later(snapshot: Snapshot, by_ns: int) -> Snapshot:
    return msgspec.structs.replace(snapshot, now_ns=snapshot.now_ns + by_ns)


def _unproved(snapshot: Snapshot) -> Snapshot:
    assert snapshot.stall is not None
    return msgspec.structs.replace(snapshot, stall=msgspec.structs.replace(snapshot.stall, may_go_on=True))


def _ended(command: HangCommand, *, ended: bool = True) -> None:
    """Close it, and wait until what it has started is over."""
    command.close(ended=ended)
    _until(lambda: not command.runs)


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class _Job(LaunchedJob):
    """One that was told to end, or not."""

    def __init__(self) -> None:
        self._told_at_s = None

    def tell(self) -> None:
        self._told_at_s = time.monotonic()


def _is_gone(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().split()[2] == "Z"


class _Source:
    """Of a watched run only who is told of it."""

    def __init__(self) -> None:
        self.listeners: list[HangCommand] = []

    def tell(self, listener: HangCommand) -> None:
        self.listeners.append(listener)


def _writes(directory: Path, job: LaunchedJob | None = None) -> HangCommand:
    """A command that appends what it is told to a file."""
    return HangCommand(("sh", "-c", f"cat >> {directory}/told"), directory, job)


def test_a_hang_that_lasts_is_told_once(tmp_path: Path) -> None:
    command = _writes(tmp_path)
    for by_ns in (0, HELD_NS // 2, HELD_NS, 2 * HELD_NS, 10 * HELD_NS):
        command.take(_later(HANGS, by_ns))
    _ended(command)
    (line,) = (tmp_path / "told").read_text().splitlines()
    told = json.loads(line)
    assert HANGS.stall is not None
    assert told["event"] == "hang" and HANGS.stall.title in told["text"]
    (culprit,) = told["culprits"]
    assert [side["ranks"] for side in told["sides"] if side["culprit"]] == [[culprit["rank"]]]
    assert told["finding"]["code"] == HANGS.verdict.code and told["finding"]["remedy"]
    assert command.note.endswith("s") and "was notified of the hang and finished" in command.note


@pytest.mark.parametrize("before", ["it goes on", "it is not proved"])
def test_a_standstill_that_passes_or_is_not_proved_is_not_told(before: str, tmp_path: Path) -> None:
    command = _writes(tmp_path)
    command.take(HANGS if before == "it goes on" else _unproved(HANGS))
    command.take(_later(RUNS if before == "it goes on" else _unproved(HANGS), HELD_NS))
    command.take(_later(HANGS if before == "it goes on" else _unproved(HANGS), HELD_NS + 1))
    command.take(_later(RUNS, 2 * HELD_NS))
    _ended(command)
    assert not (tmp_path / "told").exists() and command.note == ""


def test_a_hang_that_ends_with_the_job_is_told_at_the_end(tmp_path: Path) -> None:
    command = _writes(tmp_path)
    command.take(HANGS)
    command.take(msgspec.structs.replace(_later(HANGS, HELD_NS), state="ended"))
    assert not (tmp_path / "told").exists()
    _ended(command)
    assert json.loads((tmp_path / "told").read_text())["event"] == "hang"


def test_a_hang_that_was_only_just_seen_is_not_told_when_the_user_leaves_the_job_alone(tmp_path: Path) -> None:
    command = _writes(tmp_path)
    command.take(HANGS)
    _ended(command, ended=False)
    assert not (tmp_path / "told").exists() and command.note == ""


@pytest.mark.parametrize("shown_for_ns", [0, HELD_NS])
def test_nothing_is_started_once_the_job_was_told_to_end(shown_for_ns: int, tmp_path: Path) -> None:
    job = _Job()
    command = _writes(tmp_path, job)
    command.take(HANGS)
    job.tell()
    command.take(_later(HANGS, shown_for_ns))
    command.take(msgspec.structs.replace(_later(HANGS, HELD_NS), state="ended"))
    _ended(command)
    assert not (tmp_path / "told").exists() and command.note == ""


def test_a_standstill_that_was_cut_short_is_not_told(tmp_path: Path) -> None:
    assert HANGS.stall is not None
    cut_short = msgspec.structs.replace(HANGS.stall, may_go_on=False, cut_short=True)
    command = _writes(tmp_path)
    for by_ns in (0, HELD_NS):
        command.take(msgspec.structs.replace(_later(HANGS, by_ns), stall=cut_short))
    _ended(command)
    assert not (tmp_path / "told").exists() and command.note == ""


def test_a_look_after_the_user_has_left_starts_nothing(tmp_path: Path) -> None:
    command = _writes(tmp_path)
    command.take(HANGS)
    command.close(ended=False)
    command.take(_later(HANGS, 2 * HELD_NS))
    _until(lambda: not command.runs)
    assert not (tmp_path / "told").exists() and command.note == ""


def test_its_arguments_are_in_no_note(tmp_path: Path) -> None:
    for script in ("exit 0", "exit 3", "sleep 600"):
        command = HangCommand(("/bin/sh", "-c", f": https://hooks/s3cret; {script}"), tmp_path, longest_s=5.0)
        command.take(HANGS)
        command.take(_later(HANGS, HELD_NS))
        if script == "sleep 600":
            command.kill()
        _ended(command)
        assert "`sh`" in command.note and "s3cret" not in command.note
    with pytest.raises(UsageError) as refused:
        read_command("curl 'https://hooks/s3cret")
    assert "s3cret" not in str(refused.value)


def test_what_it_leaves_in_the_background_lives_on(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/pid; cat > /dev/null"
    command = HangCommand(("sh", "-c", script), tmp_path)
    command.take(HANGS)
    command.take(_later(HANGS, HELD_NS))
    _ended(command)
    pid = int((tmp_path / "pid").read_text())
    try:
        assert "was notified of the hang and finished" in command.note and not _is_gone(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_its_thread_hears_no_signal(tmp_path: Path) -> None:
    command = HangCommand(("sleep", "600"), tmp_path)
    command.take(HANGS)
    command.take(_later(HANGS, HELD_NS))
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "ddpdoctor-on-hang"]
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    (blocked,) = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigBlk")]
    command.kill()
    _ended(command)
    heard = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH, signal.SIGALRM, signal.SIGUSR1}
    assert [number for number in heard if not blocked >> (number - 1) & 1] == []


def test_the_report_does_not_wait_for_a_long_command_which_ctrl_c_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(streams, "say", said.append)
    monkeypatch.setattr(hang_command, "REPORT_WAITS_S", 0.5)
    source = _Source()
    told = Outlets(on_hang="sleep 600")
    told.connect(source, tmp_path)  # type: ignore[arg-type]
    (command,) = source.listeners
    command.take(HANGS)
    command.take(_later(HANGS, HELD_NS))
    began_s = time.monotonic()
    with signals.kept():
        told.close(ended=True)
        assert "`sleep` was notified of the hang and is still running" in command.note
        # To this thread: other threads of the process that runs the tests may not keep it.
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        told.finish()
    assert time.monotonic() - began_s < 20
    assert "Ctrl-C kills it" in said[0] and "`sleep` was killed by your interrupt" in said[1]


def test_more_than_a_pipe_holds_is_given_to_one_that_reads_late(tmp_path: Path) -> None:
    assert HANGS.stall is not None
    long = msgspec.structs.replace(HANGS.stall, title="x" * 500_000)
    command = HangCommand(("sh", "-c", f"sleep 0.5; cat > {tmp_path}/told"), tmp_path)
    for by_ns in (0, HELD_NS):
        command.take(msgspec.structs.replace(_later(HANGS, by_ns), stall=long))
    _ended(command)
    assert "x" * 400_000 in json.loads((tmp_path / "told").read_text())["text"]


def test_a_command_that_takes_too_long_is_killed_with_what_it_started(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/pid; cat > /dev/null; wait"
    command = HangCommand(("sh", "-c", script), tmp_path, longest_s=1.0)
    command.take(HANGS)
    command.take(_later(HANGS, HELD_NS))
    _ended(command)
    assert "took longer than 1 s and was killed" in command.note
    pid = int((tmp_path / "pid").read_text())
    _until(lambda: _is_gone(pid))


def test_a_command_that_fails_is_said_in_one_line(tmp_path: Path) -> None:
    command = HangCommand(("sh", "-c", "echo no network; exit 7"), tmp_path)
    command.take(HANGS)
    command.take(_later(HANGS, HELD_NS))
    _ended(command)
    assert "failed with exit code 7; its output is in" in command.note and "\n" not in command.note
    assert (tmp_path / OUTPUT_FILE).read_text() == "no network\n"


def test_a_command_that_is_gone_by_then_is_said(tmp_path: Path) -> None:
    command = HangCommand((str(tmp_path / "gone"),), tmp_path / "no-directory")
    command.take(HANGS)
    command.take(_later(HANGS, HELD_NS))
    _ended(command)
    assert "could not be run: No such file or directory" in command.note


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no command"),
        ("no-such-program --now", "no-such-program: no such program on the PATH"),
        (f"{os.sep}nowhere{os.sep}notify", "no such program"),
        ("sh 'unclosed", "no closing quotation"),
    ],
)
def test_what_cannot_be_a_command_is_refused_before_the_job(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_command(text)
