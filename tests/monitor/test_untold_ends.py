"""A job that ended well is not called broken where its ranks could not tell of their ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpdoctor.record import events, layout, writer
from ddpdoctor.record.assembly.ranks import LastSign, RankBook
from ddpdoctor.record.reader import RunFiles
from ddpdoctor.record.writer import EventWriter
from tests.jobs_of_tests import kill_marked, marked
from tests.monitor.watched import HEAD, MOST_S

LAUNCHER = 1
FINISHED, AT_WORK, MUTE = LastSign(finished=True), LastSign(), LastSign(mute=True)
TRAIN = """
model = DDP(nn.Linear(8, 8))
def train(steps):
    for _ in range(steps):
        model(torch.randn(4, 8)).sum().backward()
        time.sleep(0.01)
"""
DELETED = """
import shutil
train(60)
dist.barrier()
if rank == 0:
    shutil.rmtree(os.environ["DDPDOCTOR_RUN"])
train(20)
dist.destroy_process_group()
if rank == 1:
    time.sleep(4)
"""
FULL = """
train(20)
dist.destroy_process_group()
if rank == 1:
    time.sleep(4)
"""
NO_ROOM = """
import resource, tempfile
tempfile.gettempdir()
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
dist.init"""
"""From here on no file grows, as on a disk that is full."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    kill_marked(tmp_path)


def _profiled(folder: Path, code: str) -> tuple[dict[str, object], str]:
    (folder / "train.py").write_text(code)
    words = ("profile", "--no-tui", "--nproc", "2", "--run-dir", "run", "--output-format", "json", "train.py")
    environment = {**marked(os.environ, folder), "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder / "state")}
    done = subprocess.run(
        (sys.executable, "-m", "ddpdoctor", *words),
        cwd=folder, env=environment, capture_output=True, text=True, timeout=MOST_S, check=False,
    )  # fmt: skip
    return json.loads(done.stdout)["verdict"], done.stderr


def test_a_run_directory_that_the_job_deletes_takes_nothing_of_its_end(folder: Path) -> None:
    verdict, told = _profiled(folder, HEAD + TRAIN + DELETED)
    assert verdict["state"] != "broken", (verdict, told)
    assert "DDP703" not in told


def test_a_disk_that_is_full_before_the_first_step_makes_no_killed_rank_of_one_that_ended_well(folder: Path) -> None:
    verdict, told = _profiled(folder, HEAD.replace("dist.init", NO_ROOM, 1) + TRAIN + FULL)
    assert verdict["state"] == "unknown", (verdict, told)
    assert str(verdict["text"]).startswith("the ranks could not write their events")
    report = subprocess.run(
        (sys.executable, "-m", "ddpdoctor", "report", "run", "--output-format", "json"),
        cwd=folder, capture_output=True, check=True,
    )  # fmt: skip
    assert json.loads(report.stdout)["verdict"] == verdict


def _end(sign: LastSign | None, *, ended_well: int = 0, parent: int = LAUNCHER, other_runs: bool = False) -> str:
    book = RankBook()
    for rank, pid in enumerate((10, 11)):
        book.take(pid, events.Process(parent=parent, kind="start", rank=rank, time_ns=1))
    book.gone(10, 5, None)
    if not other_runs:
        book.gone(11, 5, None)
    book.ended_well = ended_well
    signs = {11: AT_WORK} if sign is None else {10: sign, 11: AT_WORK}
    return book.ranks({}, {}, last_signs=signs)[0].end


def test_how_a_rank_ended_that_left_no_event_of_it() -> None:
    lost = LastSign(lost_events=3)
    assert _end(FINISHED) == _end(FINISHED, other_runs=True) == "finished"
    assert _end(AT_WORK) == _end(None) == "signalled"
    assert (_end(lost), _end(lost, other_runs=True)) == ("unknown", "signalled"), "others may wait for it"
    assert _end(MUTE) == _end(MUTE, other_runs=True) == "unknown"
    assert {_end(sign, ended_well=LAUNCHER) for sign in (AT_WORK, None, lost, MUTE)} == {"finished"}
    # A shell around the launcher may have swallowed its exit code.
    assert _end(AT_WORK, ended_well=LAUNCHER, parent=7) == "signalled"
    assert {_end(sign, ended_well=LAUNCHER, parent=7) for sign in (None, lost, MUTE)} == {"finished"}


def test_what_tells_the_end_is_written_however_much_a_process_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MOST_EVENT_BYTES", 100)
    own = EventWriter(str(tmp_path))
    files = RunFiles(tmp_path)
    for number in range(20):
        own.write("site", number=number)
    own.write("exit", code=0, finished=True)
    (tmp_path / layout.EVENTS_FILE.format(os.getpid())).unlink(missing_ok=not [*files.poll()])
    own.write("raised", type="ValueError")
    assert own.lost > 0
    assert [event["event"] for _, event in files.poll()] == ["raised"], "a file that was deleted is read on"
    files.close()
