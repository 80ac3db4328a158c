"""The command of ``--on-hang``: once, for a proved hang alone, bounded in time, and never in the way."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import msgspec
import pytest

from ddpdoctor.cli.live.hang_command import HELD_NS, OUTPUT_FILE, HangCommand, read_command
from ddpdoctor.errors import UsageError
from ddpdoctor.monitor.demo.demo import demo_snapshot
from ddpdoctor.monitor.snapshot import Snapshot

S = 1_000_000_000
STARTED_NS = 1_700_000_000 * S
HANGS = demo_snapshot(100 * S, STARTED_NS)
RUNS = demo_snapshot(10 * S, STARTED_NS)


def _later(snapshot: Snapshot, by_ns: int) -> Snapshot:
    return msgspec.structs.replace(snapshot, now_ns=snapshot.now_ns + by_ns)


def _unproved(snapshot: Snapshot) -> Snapshot:
    assert snapshot.stall is not None
    return msgspec.structs.replace(snapshot, stall=msgspec.structs.replace(snapshot.stall, may_go_on=True))


def _writes(directory: Path) -> HangCommand:
    """A command that appends what it is told to a file."""
    return HangCommand(("sh", "-c", f"cat >> {directory}/told"), directory)


def test_a_hang_that_lasts_is_told_once(tmp_path: Path) -> None:
    command = _writes(tmp_path)
    for by_ns in (0, HELD_NS // 2, HELD_NS, 2 * HELD_NS, 10 * HELD_NS):
        command.take(_later(HANGS, by_ns))
    command.close(ended=True)
    (line,) = (tmp_path / "told").read_text().splitlines()
    told = json.loads(line)
    assert HANGS.stall is not None
    assert told["event"] == "hang" and HANGS.stall.title in told["text"]
    (culprit,) = told["culprits"]
    assert [side["ranks"] for side in told["sides"] if side["culprit"]] == [[culprit["rank"]]]
    assert told["finding"]["code"] == HANGS.verdict.code and told["finding"]["remedy"]
    assert command.note.endswith("s") and "was told of the hang and ended" in command.note


@pytest.mark.parametrize("before", ["it goes on", "it is not proved"])
def test_a_standstill_that_passes_or_is_not_proved_is_not_told(before: str, tmp_path: Path) -> None:
    command = _writes(tmp_path)
    command.take(HANGS if before == "it goes on" else _unproved(HANGS))
    command.take(_later(RUNS if before == "it goes on" else _unproved(HANGS), HELD_NS))
    command.take(_later(HANGS if before == "it goes on" else _unproved(HANGS), HELD_NS + 1))
    command.take(_later(RUNS, 2 * HELD_NS))
    command.close(ended=True)
    assert not (tmp_path / "told").exists() and command.note == ""


def test_a_hang_that_ends_with_the_job_is_told_at_the_end(tmp_path: Path) -> None:
    command = _writes(tmp_path)
    command.take(HANGS)
    command.take(msgspec.structs.replace(_later(HANGS, HELD_NS), state="ended"))
    assert not (tmp_path / "told").exists()
    command.close(ended=True)
    assert json.loads((tmp_path / "told").read_text())["event"] == "hang"


def test_a_hang_that_was_only_just_seen_is_not_told_when_the_user_leaves_the_job_alone(tmp_path: Path) -> None:
    command = _writes(tmp_path)
    command.take(HANGS)
    command.close(ended=False)
    assert not (tmp_path / "told").exists() and command.note == ""


def test_a_command_that_takes_too_long_is_killed_with_what_it_started(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/pid; cat > /dev/null; wait"
    command = HangCommand(("sh", "-c", script), tmp_path, longest_s=1.0)
    command.take(HANGS)
    command.take(_later(HANGS, HELD_NS))
    command.close(ended=True)
    assert "took longer than 1 s and was killed" in command.note
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the sleep goes on"
        time.sleep(0.02)


def test_a_command_that_fails_is_said_in_one_line(tmp_path: Path) -> None:
    command = HangCommand(("sh", "-c", "echo no network; exit 7"), tmp_path)
    command.take(HANGS)
    command.take(_later(HANGS, HELD_NS))
    command.close(ended=True)
    assert "failed with exit code 7; what it printed is in" in command.note and "\n" not in command.note
    assert (tmp_path / OUTPUT_FILE).read_text() == "no network\n"


def test_a_command_that_is_gone_by_then_is_said(tmp_path: Path) -> None:
    command = HangCommand((str(tmp_path / "gone"),), tmp_path / "no-directory")
    command.take(HANGS)
    command.take(_later(HANGS, HELD_NS))
    command.close(ended=True)
    assert "could not be run: No such file or directory" in command.note


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no command"),
        ("no-such-program --now", "no-such-program: no such program on the PATH"),
        (f"{os.sep}nowhere{os.sep}notify", "no such program"),
        ("sh 'unclosed", "no closing quotation"),
    ],
)
def test_what_cannot_be_a_command_is_refused_before_the_job(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_command(text)
