"""What is removed after a rehearsal, and what never is, whatever the log says."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from ddpdoctor.launch.created_files import HOLDS_OTHERS, Cleaning, born_ns, created_paths, remove_created
from ddpdoctor.probe.rehearsal.files.created_log import LOG_NAME, Record, encode


def _forge(project: Any, *records: Record) -> None:
    (project.run_directory / LOG_NAME).write_bytes(b"".join(encode(record) for record in records))


def test_what_was_made_is_listed_then_removed_and_renames_are_followed(project: Any) -> None:
    project.old({"data.csv": "x", "runs/old": "x"})
    project.rehearse(
        """
        import os
        os.makedirs("out/deep"); open("out/deep/a", "w"); os.rename("out/deep", "out/renamed")
        open("tmp", "w"); os.replace("tmp", "runs/last"); os.symlink("last", "runs/latest"); os.link("data.csv", "copy")
        """
    )
    made = ["copy", "out", "out/renamed", "out/renamed/a", "runs/last", "runs/latest"]
    assert project.created() == made
    assert project.clean() == made
    assert project.tree() == project.before
    assert project.created() == []


def test_sockets_are_the_ranks_own_and_do_not_outlive_those_that_are_killed(project: Any) -> None:
    outcome = project.rehearse(
        """
        import os, socket
        os.mkdir("pymp")
        for name in ("pymp/left", "removed", f"\\0{os.getpid()}"):
            socket.socket(socket.AF_UNIX).bind(name)
        socket.socket().bind(("127.0.0.1", 0))
        os.remove("removed")
        """
    )
    assert (outcome.refusals, outcome.exit_code) == ((), 0), outcome.stderr
    assert project.clean() == ["pymp", "pymp/left"]
    assert project.tree() == project.before == {}


def test_a_directory_with_somebody_elses_file_stays(project: Any) -> None:
    project.rehearse("import os; os.mkdir('out'); open('out/a', 'w')")
    (project.path / "out" / "mine").write_text("x")
    assert project.clean() == ["out/a"]
    assert (project.created(), sorted(project.tree())) == ([], ["out", "out/mine"])
    assert [left.reason for left in created_paths(project.run_directory).left] == [HOLDS_OTHERS]


def test_nothing_to_do_without_a_log(tmp_path: Path) -> None:
    assert created_paths(tmp_path) == remove_created(tmp_path) == Cleaning()
    assert remove_created(tmp_path / "missing") == Cleaning()


def test_a_forged_record_of_an_old_file_removes_nothing(project: Any) -> None:
    project.old({"old.pt": "x", "empty/x": "x"})
    (project.path / "empty" / "x").unlink()
    project.before = project.tree()
    time.sleep(0.1)
    root = str(project.path)
    kinds = [Record(kind, f"{root}/old.pt", 1) for kind in ("file", "directory", "name")]
    moved = Record("file", f"{root}/old.pt", 1, moved_from="/somewhere")
    for record in [*kinds, moved, Record("directory", f"{root}/empty", 1), Record("directory", root, 1)]:
        _forge(project, record)
        assert remove_created(project.run_directory).made == ()
        assert project.tree() == project.before


def test_an_old_file_that_changed_during_the_rehearsal_is_not_taken_for_a_new_one(project: Any) -> None:
    project.old({"live.log": "x"})
    time.sleep(0.1)
    _forge(project, Record("file", f"{project.path}/live.log", 1))
    (project.path / "live.log").write_text("appended by another job")
    os.chmod(project.path / "live.log", 0o600)
    assert born_ns(str(project.path / "live.log")) is not None
    assert remove_created(project.run_directory).made == ()


def test_a_file_made_before_its_record_is_not_removed(project: Any) -> None:
    (project.run_directory / LOG_NAME).write_bytes(b"")
    time.sleep(0.1)
    (project.path / "mine").write_text("x")
    time.sleep(0.1)
    _forge(project, Record("file", f"{project.path}/mine", time.time_ns()))
    assert remove_created(project.run_directory).made == ()


def test_a_path_through_a_link_is_not_followed(project: Any, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    _forge(project, Record("file", f"{project.path}/out/precious", 1), Record("file", f"{project.path}/link", 1))
    (elsewhere / "precious").write_text("x")
    (project.path / "out").symlink_to(elsewhere)
    (project.path / "link").symlink_to(elsewhere / "precious")
    assert remove_created(project.run_directory).made == ()
    assert (elsewhere / "precious").exists()


def test_a_kind_that_does_not_fit_is_not_removed(project: Any) -> None:
    (project.run_directory / LOG_NAME).write_bytes(b"")
    root = str(project.path)
    now_ns = time.time_ns()
    _forge(
        project,
        *(Record(kind, f"{root}/{name}", now_ns) for kind, name in (("file", "d"), ("directory", "f"), ("name", "f"))),
    )
    (project.path / "d").mkdir()
    (project.path / "f").write_text("x")
    assert remove_created(project.run_directory).made == ()


def test_the_run_directory_and_what_holds_it_are_never_removed(project: Any) -> None:
    now_ns = time.time_ns()
    run = str(project.run_directory)
    _forge(
        project,
        Record("file", f"{run}/{LOG_NAME}", now_ns),
        Record("directory", run, now_ns),
        Record("directory", "/", now_ns),
    )
    assert remove_created(project.run_directory).made == ()


def test_birth_time_is_near_the_clock(tmp_path: Path) -> None:
    before_ns = time.time_ns()
    (tmp_path / "a").write_text("x")
    born = born_ns(str(tmp_path / "a"))
    assert born is None or before_ns - 50_000_000 <= born <= time.time_ns()
    assert born_ns(str(tmp_path / "missing")) is None
