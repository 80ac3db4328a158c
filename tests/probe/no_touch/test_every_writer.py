"""Every way of writing in one table: an old file keeps content, mode and time, a new one is listed and removed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.probe.no_touch.writers import REMOVERS, WRITERS

PRELUDE = """
import itertools, json, os, shutil, sys, zipfile
from pathlib import Path
count = itertools.count()
FROM, EMPTY = os.path.abspath("source.txt"), os.path.abspath("empty")

def fresh():
    name = f"fresh_{next(count)}"
    open(name, "w").write("n")
    return name

def zipped(path):
    name = f"zipped_{next(count)}.zip"
    with zipfile.ZipFile(name, "w") as archive:
        archive.writestr(path.lstrip("/"), "n")
    return name

said = {}
for name, path, code in json.loads(CASES):
    names = {"FROM": FROM, "EMPTY": EMPTY, "fresh": fresh, "zipped": zipped, "os": os, "shutil": shutil, "Path": Path}
    try:
        exec(code, {"P": path, **names})
        said[name] = ""
    except BaseException as error:
        said[name] = f"{type(error).__name__}: {error}"
json.dump(said, open("said.json", "w"))
"""
"""Tries all of them in one process: the guard of these tests raises where that of a rank ends the rank."""


def _try(
    project: Any, cases: Mapping[str, tuple[Path, str]], *, torch: bool = True, allow_writes: bool = False
) -> tuple[dict[str, str], Any]:
    code = json.dumps([[name, str(path), code] for name, (path, code) in cases.items()])
    outcome = project.rehearse(f"CASES = {code!r}\n{PRELUDE}", torch=torch, allow_writes=allow_writes)
    assert outcome.exit_code == 0, outcome.stderr
    said = json.loads((project.path / "said.json").read_text())
    assert set(said) == set(cases)
    return said, outcome


def _states(root: Path) -> dict[str, tuple[int, int, int]]:
    """Mode, time of the last change and inode of every file."""
    found = {}
    for path in root.rglob("*"):
        status = path.lstat()
        if not path.is_dir():
            found[str(path)] = (status.st_mode, status.st_mtime_ns, status.st_ino)
    return found


def _installed() -> dict[str, tuple[str, str]]:
    return {writer.name: (writer.code, writer.suffix) for writer in WRITERS if writer.is_here}


def test_no_writer_changes_an_old_file_and_each_is_told_which_it_was(project: Any) -> None:
    writers = _installed()
    old = {name: project.path / "old" / f"{name}{suffix}" for name, (_, suffix) in writers.items()}
    project.old({"source.txt": "n", **{str(path.relative_to(project.path)): b"o" * 64 for path in old.values()}})
    (project.path / "empty").mkdir()
    project.before = project.tree()
    states = _states(project.path)
    _, outcome = _try(project, {name: (old[name], code) for name, (code, _) in writers.items()})
    refused = {refusal.path for refusal in outcome.refusals}
    assert sorted(str(path) for path in old.values() if str(path) not in refused) == []
    assert all("which the rehearsal did not create" in refusal.sentence for refusal in outcome.refusals)
    project.clean()
    assert project.tree() == project.before
    assert _states(project.path) == states


def test_every_writer_may_make_a_new_file_which_is_listed_and_then_removed(project: Any) -> None:
    writers = _installed()
    project.old({"source.txt": "n", "new/placeholder": "o"})
    (project.path / "empty").mkdir()
    project.before = project.tree()
    new = {name: project.path / "new" / f"{name}{suffix}" for name, (_, suffix) in writers.items()}
    said, outcome = _try(project, {name: (new[name], code) for name, (code, _) in writers.items()})
    assert {name: text for name, text in said.items() if text} == {}
    assert outcome.refusals == ()
    missing = [name for name, path in new.items() if not path.exists()]
    assert missing == []
    listed = set(project.created())
    assert [name for name, path in new.items() if str(path.relative_to(project.path)) not in listed] == []
    project.clean()
    assert project.tree() == project.before


def test_with_allow_writes_old_files_change_and_none_of_them_is_removed(project: Any) -> None:
    writers = {name: entry for name, entry in _installed().items() if name not in ("shutil_move", "zip_extracted")}
    old = {name: project.path / "old" / f"{name}{suffix}" for name, (_, suffix) in writers.items()}
    project.old({"source.txt": "n", **{str(path.relative_to(project.path)): b"o" * 64 for path in old.values()}})
    (project.path / "empty").mkdir()
    _, outcome = _try(project, {name: (old[name], code) for name, (code, _) in writers.items()}, allow_writes=True)
    assert outcome.refusals == ()
    project.clean()
    assert [name for name, path in old.items() if not path.exists()] == []


def test_nothing_takes_an_old_file_away_or_changes_its_mode(project: Any) -> None:
    old = {name: project.path / f"{index}" / "old" for index, name in enumerate(REMOVERS)}
    project.old({str(path.relative_to(project.path)): b"o" * 64 for path in old.values()})
    states = _states(project.path)
    _, outcome = _try(project, {name: (old[name], code) for name, code in REMOVERS.items()}, torch=False)
    assert len(outcome.refusals) >= len(REMOVERS)
    project.clean()
    assert project.tree() == project.before
    assert _states(project.path) == states


@pytest.mark.parametrize(
    "code",
    [
        "import pathlib; pathlib.Path('old.txt').touch()",
        "import os; os.utime('old.txt', (1, 1)); os.utime('folder', ns=(1, 1))",
        "import os; os.utime(os.open('old.txt', os.O_RDONLY), (1, 1))",
        "import os; os.symlink('old.txt', 'link'); os.utime('link', (1, 1))",
    ],
)
def test_the_times_of_an_old_file_stay_without_a_word(project: Any, code: str) -> None:
    project.old({"old.txt": "o", "folder/old.txt": "o"})
    times = [(project.path / name).stat().st_mtime_ns for name in ("old.txt", "folder")]
    outcome = project.rehearse(code + "\nopen('new', 'w').close(); os = __import__('os'); os.utime('new', (1, 1))")
    assert (outcome.refusals, outcome.exit_code) == ((), 0), outcome.stderr
    assert [(project.path / name).stat().st_mtime_ns for name in ("old.txt", "folder")] == times
    assert (project.path / "new").stat().st_mtime == 1


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no shared memory here")
def test_files_outside_of_the_project_are_guarded_and_removed_as_well(project: Any, tmp_path: Path) -> None:
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    (outside / "old").write_text("o")
    shared = Path("/dev/shm") / f"{tmp_path.name}_{os.getpid()}"
    _, outcome = _try(
        project,
        {
            "old": (outside / "old", "open(P, 'w')"),
            "new": (outside / "new", "open(P, 'w')"),
            "shared memory": (shared, "open(P, 'w')"),
        },
        torch=False,
    )
    assert [refusal.path for refusal in outcome.refusals] == [str(outside / "old")]
    project.clean()
    assert (outside / "old").read_text() == "o"
    assert [path.name for path in outside.iterdir()] == ["old"]
    assert not shared.exists()
