"""What a rehearsal that was killed leaves is listed, and removed on demand; the user's own work never is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from ddpdoctor.cli.main import ddpdoctor
from ddpdoctor.errors import UsageError
from ddpdoctor.launch.created_files import CHANGED, HOLDS_OTHERS, IN_USE, clean_up, leftovers, leftovers_text
from ddpdoctor.launch.kept_runs import OWNER_FILE, remove_run_directory, state_directory, this_process
from ddpdoctor.probe.rehearsal.files.created_log import LOG_NAME, CreatedFiles, identity_of
from ddpdoctor.record import layout


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def killed(tmp_path: Path) -> Callable[..., Path]:
    """Make the run directory of a killed rehearsal that had made ``ckpt.pt``, ``metrics.csv`` and ``runs/a``."""

    def make(**owner: str | int) -> Path:
        directory = state_directory() / "runs" / "rehearsal-20260101-000000-x"
        directory.mkdir(parents=True)
        child = subprocess.Popen([sys.executable, "-c", "pass"])
        child.wait()
        dead = replace(this_process(), **({"pid": child.pid} | owner))
        (directory / OWNER_FILE).write_bytes(msgspec.json.encode(dead))
        (directory / layout.JOB_FILE).write_text(json.dumps({"job": {"script": "/p/train.py"}}))
        project = tmp_path / "project"
        project.mkdir()
        log = CreatedFiles(str(directory))
        for kind, name in (("file", "ckpt.pt"), ("file", "metrics.csv"), ("directory", "runs"), ("file", "runs/a")):
            path = project / name
            log.note(kind, str(path))
            if kind == "directory":
                path.mkdir()
            else:
                path.write_text("made by a rank")
            log.note("closed", str(path), identity=identity_of(path.stat()))
        return project

    return make


def test_what_is_left_is_told_and_stays_until_it_is_cleaned(killed: Callable[..., Path]) -> None:
    project = killed()
    assert "ckpt.pt and 3 more; `ddpdoctor clean`" in leftovers_text(leftovers())
    assert len(list(project.rglob("*"))) == 4
    (leftover,) = leftovers()
    assert clean_up(leftover).left == ()
    assert list(project.iterdir()) == []
    assert leftovers() == []
    assert list((state_directory() / "runs").iterdir()) == []


@pytest.mark.parametrize(
    "work",
    [
        lambda path: path.write_text("made by a rank"),
        lambda path: path.write_text("of the real training"),
        lambda path: os.truncate(path, 3),
        lambda path: (path.with_suffix(".tmp").write_text("made by a rank"), path.with_suffix(".tmp").replace(path)),
        lambda path: (path.unlink(), path.write_text("made by a rank")),
        lambda path: path.chmod(0o400),
        lambda path: os.link(path, path.with_suffix(".kept")),
        lambda path: os.utime(path),
    ],
)
def test_a_file_that_the_user_touched_since_is_the_users(
    killed: Callable[..., Path], work: Callable[[Path], object]
) -> None:
    project = killed()
    work(project / "ckpt.pt")
    content = (project / "ckpt.pt").read_text()
    (leftover,) = leftovers()
    assert {left.path: left.reason for left in leftover.files.left} == {str(project / "ckpt.pt"): CHANGED}
    clean_up(leftover)
    assert (project / "ckpt.pt").read_text() == content
    assert not (project / "metrics.csv").exists()


def test_a_directory_that_holds_something_else_stays_and_so_does_what_is_in_use(killed: Callable[..., Path]) -> None:
    project = killed()
    (project / "runs" / "mine").write_text("x")
    with (project / "metrics.csv").open("a"):
        (leftover,) = leftovers()
        reasons = {Path(left.path).name: left.reason for left in leftover.files.left}
        assert reasons == {"metrics.csv": IN_USE, "runs": HOLDS_OTHERS}
        clean_up(leftover)
    assert sorted(path.name for path in project.rglob("*")) == ["metrics.csv", "mine", "runs"]
    (leftover,) = leftovers()
    clean_up(leftover)
    assert sorted(path.name for path in project.rglob("*")) == ["mine", "runs"]
    assert leftovers() == []


def test_once_all_is_the_users_nothing_is_told_and_the_record_goes(killed: Callable[..., Path]) -> None:
    project = killed()
    for name in ("ckpt.pt", "metrics.csv", "runs/a"):
        (project / name).write_text("of the real training")
    assert leftovers_text(leftovers()) == ""
    assert list((state_directory() / "runs").iterdir()) == []
    assert len(list(project.rglob("*"))) == 4


@pytest.mark.parametrize("owner", [{"host": "another"}, {"boot": "another", "machine": ""}])
def test_the_run_of_another_machine_is_shown_and_never_touched(
    killed: Callable[..., Path], owner: dict[str, str]
) -> None:
    project = killed(**owner)
    assert leftovers_text(leftovers()) == ""
    done = CliRunner().invoke(ddpdoctor, ["clean", "--yes"])
    assert done.exit_code == 0
    assert "is not touched: it was started on " in done.output
    assert len(list(project.rglob("*"))) == 4
    assert len(leftovers()) == 1


def test_a_run_that_lives_is_not_even_shown(killed: Callable[..., Path]) -> None:
    project = killed(pid=os.getpid())
    assert leftovers() == []
    assert len(list(project.rglob("*"))) == 4


def test_the_command_shows_asks_for_leave_and_removes(killed: Callable[..., Path]) -> None:
    runner = CliRunner()
    assert runner.invoke(ddpdoctor, ["clean"]).output == "There are no leftovers of killed rehearsals.\n"
    project = killed()
    done = runner.invoke(ddpdoctor, ["clean"])
    assert f"  {project}/ckpt.pt\n" in done.output
    assert isinstance(done.exception, UsageError)
    assert len(list(project.rglob("*"))) == 4
    done = runner.invoke(ddpdoctor, ["clean", "--yes"])
    assert (done.exit_code, done.output.splitlines()[-1]) == (0, "Removed 4 paths.")
    assert list(project.iterdir()) == []


@pytest.mark.parametrize("replace_by", ["a link", "nothing"])
def test_what_takes_the_place_of_a_run_directory_before_it_is_removed_stays(
    replace_by: str, killed: Callable[..., Path], tmp_path: Path
) -> None:
    killed()
    (leftover,) = leftovers()
    mine = tmp_path / "mine"
    (mine / "layers").mkdir(parents=True)
    (mine / "layers" / "thesis.tex").write_text("years of work")
    leftover.run_directory.rename(tmp_path / "aside")
    if replace_by == "a link":
        leftover.run_directory.symlink_to(mine)
    clean_up(leftover)
    remove_run_directory(leftover.run_directory)
    assert (mine / "layers" / "thesis.tex").read_text() == "years of work"
    assert (tmp_path / "project" / "ckpt.pt").exists()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [OWNER_FILE, layout.JOB_FILE, LOG_NAME])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.mkdir()])
def test_what_is_no_file_in_a_run_directory_removes_nothing(
    name: str, make: Callable[[Path], object], killed: Callable[..., Path]
) -> None:
    project = killed()
    directory = state_directory() / "runs" / "rehearsal-20260101-000000-x"
    (directory / name).unlink()
    make(directory / name)
    for leftover in leftovers():
        if not leftover.foreign:
            clean_up(leftover)
    assert len(list(project.rglob("*"))) == 4
