"""Runs a script in a process of its own that is guarded as a rank of a rehearsal is, beside real files."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import ddpdoctor
from ddpdoctor.launch.created_files import created_paths, remove_created

_RANK = """
import importlib, json, os, runpy, sys, types
package_directory, run_directory, allow_writes, wants_torch, script = sys.argv[1:6]
package = types.ModuleType("_ddpdoctor")
package.__path__ = [package_directory]
sys.modules["_ddpdoctor"] = package
no_touch = importlib.import_module("_ddpdoctor.probe.rehearsal.files.no_touch")

class Ended(SystemExit):
    pass

def write(kind, *values):
    with open(os.path.join(run_directory, "events-%d.jsonl" % os.getpid()), "a") as events:
        events.write(json.dumps([kind, *values]) + "\\n")

def refused(action, path, sentence):
    write("refused", action, path, sentence)
    raise Ended(0)

no_touch.install(run_directory, allow_writes == "yes", refused,
                 lambda *event: write("file", *event), lambda command, held: write("child", command))
if wants_torch == "yes":
    import torch
    no_touch.wrap_torch_writers(torch)
sys.argv[:] = [script]
sys.path[0] = os.path.dirname(script)
runpy.run_path(script, run_name="__main__")
"""


@dataclass(frozen=True)
class Refused:
    """What the guard said when it stopped an operation."""

    action: str
    path: str
    sentence: str


@dataclass(frozen=True)
class Outcome:
    """What a guarded process did."""

    exit_code: int
    stderr: str
    refusals: tuple[Refused, ...] = ()
    files: tuple[tuple[str, str, bool], ...] = ()
    """(action, path relative to the project, existed before)."""
    children: tuple[str, ...] = ()


@dataclass
class Project:
    """A user's directory with files in it, and the run directory of one rehearsal."""

    path: Path
    run_directory: Path
    scripts: Path
    before: dict[str, str] = field(default_factory=dict)

    def old(self, files: Mapping[str, str | bytes]) -> None:
        """Put files there that exist before the rehearsal, then remember the whole tree."""
        for name, content in files.items():
            target = self.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content if isinstance(content, bytes) else content.encode())
        self.before = self.tree()

    def tree(self) -> dict[str, str]:
        """Digest everything below the project directory."""
        return {str(path.relative_to(self.path)): _digest(path) for path in sorted(self.path.rglob("*"))}

    def start(
        self, code: str, *, torch: bool = False, allow_writes: bool = False, python: str = sys.executable
    ) -> subprocess.Popen[str]:
        """Start a guarded process that runs ``code`` in the project directory."""
        self.before = self.before or self.tree()
        script = self.scripts / f"train_{len(list(self.scripts.iterdir()))}.py"
        script.write_text(textwrap.dedent(code))
        package = str(Path(ddpdoctor.__file__).parent)
        flags = ["yes" if flag else "no" for flag in (allow_writes, torch)]
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
        command = [python, "-c", _RANK, package, str(self.run_directory), *flags, str(script)]
        return subprocess.Popen(command, cwd=self.path, env=environment, text=True, stderr=subprocess.PIPE)

    def finish(self, process: subprocess.Popen[str]) -> Outcome:
        """Wait for a guarded process and read what it told."""
        _, stderr = process.communicate(timeout=120)
        events = []
        for file in sorted(self.run_directory.glob("events-*.jsonl")):
            events += [json.loads(line) for line in file.read_text().splitlines()]
        files = [
            (action, os.path.relpath(path, self.path), existed)
            for kind, *rest in events
            if kind == "file"
            for action, path, existed in [rest]
        ]
        return Outcome(
            exit_code=process.returncode,
            stderr=stderr,
            refusals=tuple(Refused(*rest) for kind, *rest in events if kind == "refused"),
            files=tuple(files),
            children=tuple(rest[0] for kind, *rest in events if kind == "child"),
        )

    def rehearse(self, code: str, *, torch: bool = False, allow_writes: bool = False) -> Outcome:
        """Run ``code`` as a guarded process to its end."""
        return self.finish(self.start(code, torch=torch, allow_writes=allow_writes))

    def created(self) -> list[str]:
        """What the ranks made and is there, relative to the project."""
        return [os.path.relpath(path, self.path) for path in created_paths(self.run_directory).made]

    def clean(self) -> list[str]:
        """Remove what the ranks made."""
        return [os.path.relpath(path, self.path) for path in remove_created(self.run_directory).made]


def _digest(path: Path) -> str:
    if path.is_symlink():
        return "link to " + os.readlink(path)
    if path.is_dir():
        return "directory"
    if not path.is_file():
        return "a pipe, socket or device"
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """An empty project."""
    project = Project(tmp_path / "project", tmp_path / "run", tmp_path / "scripts")
    for place in (project.path, project.run_directory, project.scripts):
        place.mkdir()
    return project


@pytest.fixture
def stopped(project: Project) -> Callable[..., Refused]:
    """Rehearse a script that must be stopped before it touches anything; return the refusal."""

    def run(code: str, *, torch: bool = False) -> Refused:
        outcome = project.rehearse(code, torch=torch)
        assert outcome.refusals, outcome.stderr
        assert outcome.exit_code == 0, outcome.stderr
        project.clean()
        assert project.tree() == project.before
        return outcome.refusals[0]

    return run


@pytest.fixture
def allowed(project: Project) -> Callable[..., Outcome]:
    """Rehearse a script that must run to its end; what it made is removed afterwards."""

    def run(code: str, *, torch: bool = False) -> Outcome:
        outcome = project.rehearse(code + "\nopen('reached_the_end', 'w').close()", torch=torch)
        assert outcome.refusals == ()
        assert (project.path / "reached_the_end").exists(), outcome.stderr
        assert outcome.exit_code == 0, outcome.stderr
        project.clean()
        assert project.tree() == project.before
        return outcome

    return run
