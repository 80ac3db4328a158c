"""Several processes of one job share what they made, and only that."""

from __future__ import annotations

import binascii
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.probe.rehearsal.files.created_log import LOG_NAME, CreatedFiles, Record, decode, encode


def read_log(run_directory: str) -> Iterator[Record]:
    """Yield the undamaged records of a run directory's log, in order; none when there is no log."""
    try:
        with open(f"{run_directory}/{LOG_NAME}", "rb") as log:
            for line in log:
                record = decode(line)
                if record is not None:
                    yield record
    except OSError:
        return


def test_ranks_that_make_the_same_new_files_at_once_never_meet_a_foreign_file(project: Any) -> None:
    code = """
    import os, pathlib
    for number in range(300):
        pathlib.Path(f"file_{number % 10}").write_text("x")
        os.makedirs(f"directory_{number % 50}", exist_ok=True)
        pathlib.Path(f"tmp_{os.getpid()}").write_text("x")
        os.replace(f"tmp_{os.getpid()}", f"atomic_{number % 50}")
        if number % 7 == 0:
            pathlib.Path(f"file_{number % 10}").unlink(missing_ok=True)
    """
    processes = [project.start(code) for _ in range(6)]
    outcomes = [project.finish(process) for process in processes]
    assert [outcome.exit_code for outcome in outcomes] == [0] * 6, outcomes[0].stderr
    assert outcomes[-1].refusals == ()
    assert "doubtful" not in {record.kind for record in read_log(str(project.run_directory))}
    project.clean()
    assert project.tree() == project.before == {}


def test_a_rename_that_comes_long_after_its_record_meets_files_of_the_job(project: Any) -> None:
    slow = """
    import os, pathlib, sys, time
    def hold(event, arguments):
        if event == "os.rename":
            pathlib.Path("waits").write_text("")
            while not os.path.exists("go"):
                time.sleep(0.01)
    pathlib.Path("first").write_text("first")
    sys.addaudithook(hold)
    os.replace("first", "best")
    """
    held = project.start(slow)
    while not (project.path / "waits").exists():
        assert held.poll() is None
        time.sleep(0.01)
    often = """
    import os
    for number in range(40):
        open("next", "w").write("x" * number)
        os.replace("next", "best")
    """
    assert project.rehearse(often).refusals == ()
    assert project.rehearse("open('go', 'w')").exit_code == 0
    assert project.finish(held).exit_code == 0
    assert (project.path / "best").read_text() == "first"
    assert project.rehearse("import os; open('next', 'w'); os.replace('next', 'best')").refusals == ()
    project.clean()
    assert project.tree() == {}


def test_a_file_of_another_rank_may_be_changed_renamed_and_removed(project: Any) -> None:
    assert project.rehearse("open('a', 'w'); open('b', 'w'); open('c', 'w')").exit_code == 0
    outcome = project.rehearse("import os; open('a', 'w'); os.rename('b', 'd'); os.remove('c'); os.remove('d')")
    assert outcome.refusals == ()
    assert project.clean() == ["a"]


def test_files_of_an_earlier_rehearsal_are_old_files(project: Any) -> None:
    project.rehearse("open('a', 'w')")
    os.remove(project.run_directory / LOG_NAME)
    assert project.rehearse("open('a', 'w')").refusals[0].action == "write"


def test_allow_writes_lets_old_files_change_and_never_cleans_them_up(project: Any) -> None:
    project.old({"last.pt": "old", "keep.txt": "old", "log": "1\n", "runs/a": "old", "moved/x": "old", "data": "x"})
    outcome = project.rehearse(
        """
        import os, shutil
        os.remove("last.pt"); open("last.pt", "w").write("new")
        open("log", "a").write("2")
        os.rename("data", "data.bak"); open("data", "w").write("new")
        shutil.rmtree("runs"); os.mkdir("runs"); open("runs/b", "w").write("new")
        open("moved/mine", "w").write("new"); os.rename("moved", "renamed")
        open("tmp", "w").write("new"); os.replace("tmp", "keep.txt")
        """,
        allow_writes=True,
    )
    assert outcome.refusals == ()
    assert ("write", "log", True) in outcome.files
    assert ("remove", "last.pt", True) in outcome.files
    assert ("rename", "keep.txt", True) in outcome.files
    assert project.clean() == ["renamed/mine", "runs/b"]
    assert (project.path / "last.pt").read_text() == "new"
    assert (project.path / "keep.txt").read_text() == "new"
    assert sorted(project.tree()) == [
        *("data", "data.bak", "keep.txt", "last.pt", "log", "renamed", "renamed/x", "runs")
    ]


def test_the_callbacks_hear_who_made_and_changed_what(project: Any) -> None:
    project.old({"old": "x"})
    outcome = project.rehearse(
        """
        import os, subprocess, sys
        os.mkdir("d"); open("d/a", "w"); open("d/a", "a"); os.replace("d/a", "d/b"); os.remove("d/b"); os.rmdir("d")
        subprocess.run([sys.executable, "-c", "print(1)"]); os.system("true")
        """
    )
    assert outcome.files == (
        ("mkdir", "d", False),
        ("create", "d/a", False),
        ("write", "d/a", False),
        ("rename", "d/b", False),
        ("remove", "d/b", False),
        ("remove", "d", False),
    )
    assert outcome.children == (f"{sys.executable} -c 'print(1)'", "true")


def test_a_refusal_that_does_not_end_the_process_still_prevents_the_operation(project: Any, tmp_path: Path) -> None:
    project.old({"old": "x"})
    code = """
try:
    open("old", "w")
except SystemExit:
    pass
open("old", "a")
"""
    outcome = project.rehearse(code)
    assert len(outcome.refusals) == 2
    assert project.tree() == project.before


def test_a_script_may_close_every_descriptor_and_its_files_stay_its_own(project: Any) -> None:
    outcome = project.rehearse("import os; open('a', 'w'); os.closerange(3, 64); open('b', 'w').write('mine')")
    assert (outcome.exit_code, outcome.refusals) == (0, ())
    assert (project.path / "b").read_text() == "mine"


def test_temporary_files_that_die_with_the_interpreter_raise_nothing(project: Any) -> None:
    outcome = project.rehearse(
        """
        import tempfile, os
        class Holder:
            def __init__(self):
                self.directory = tempfile.mkdtemp(dir=".")
            def __del__(self):
                open(self.directory + "/late", "w").close()
                os.remove(self.directory + "/late")
                os.rmdir(self.directory)
        import sys
        sys.modules["holder"] = Holder()
        kept = tempfile.TemporaryDirectory(dir=".")
        kept.cycle = kept
        """
    )
    assert "Traceback" not in outcome.stderr
    assert "Error" not in outcome.stderr


def test_python_3_9_loads_and_keeps_the_rule(project: Any) -> None:
    python = shutil.which("python3.9")
    if python is None or subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode != 0:
        pytest.skip("no Python 3.9 here")
    project.old({"old": "x"})
    outcome = project.finish(project.start("open('new', 'w'); open('old', 'w')", python=python))
    assert [refusal.action for refusal in outcome.refusals] == ["write"], outcome.stderr
    assert project.tree()["old"] == project.before["old"]


def test_records_survive_odd_names(tmp_path: Path) -> None:
    for name in ("plain", "new\nline", 'quote"', "ünï", os.fsdecode(b"\xff\xfe"), "tab\t"):
        record = Record("file", f"/data/{name}", 5, "/data/old")
        assert decode(encode(record)) == record
        assert encode(record).count(b"\n") == 1


@pytest.mark.parametrize(
    "payload",
    [
        ["file", "relative", 1, ""],
        ["file", "/a/../etc", 1, ""],
        ["file", "/a/b\0", 1, ""],
        ["tree", "/a", 1, ""],
        ["file", "/a", -1, ""],
        ["file", "/a", "now", ""],
        ["file", "/a", 1, "../b"],
        ["file", "/a", 1],
        ["file", ["/a"], 1, ""],
        {"file": 1},
        7,
    ],
)
def test_a_record_that_is_not_plain_is_ignored(payload: Any) -> None:
    line = encode(Record("file", "/a", 1))
    text = json.dumps(payload).encode()
    assert decode(line) is not None
    assert decode(b"%08x %s\n" % (binascii.crc32(text), text)) is None


def test_a_damaged_line_hides_only_itself(tmp_path: Path) -> None:
    files = CreatedFiles(str(tmp_path), clock=lambda: 9)
    files.note("file", "/data/a")
    with open(tmp_path / LOG_NAME, "ab") as log:
        log.write(encode(Record("file", "/data/b", 9)).replace(b"/b", b"/c") + b"\xff\xfe\n")
    files.note("file", "/data/d")
    assert [record.path for record in read_log(str(tmp_path))] == ["/data/a", "/data/d"]
    assert files.entry("/data/c") is None
    assert files.entry("/data/d") is not None
