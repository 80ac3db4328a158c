"""Finds the Python that runs the ranks: one that has torch, in the environment that the user means or has active."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ddpdoctor.errors import DdpDoctorError, UsageError
from ddpdoctor.launch.request import Launch

# What git says of the project: its commit, and another revision, checked out beside it for as long as it is needed.

_NO_HOOKS = ("-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false")
"""A hook of the project's must not run for a check-out that no one works in."""


_LONGEST_S = 5.0
"""In a repository of millions of files a look for changes may take longer; then nothing is said."""


def commit_of(directory: Path) -> str:
    """Return the commit of a directory, with ``-dirty`` where files differ from it; empty where git does not tell."""
    words = ["git", "-C", str(directory), "--no-optional-locks", "describe", "--always", "--abbrev=12", "--dirty"]
    try:
        done = subprocess.run(
            [*words, "--exclude=*"], capture_output=True, text=True, check=False, errors="replace", timeout=_LONGEST_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@contextmanager
def other_revision(revision: str) -> Iterator[Path]:
    """The directory that is this working directory in another revision; it is removed afterwards.

    Raises UsageError outside of a git repository and for a revision that it does not have.
    """
    top = _git("rev-parse", "--show-toplevel", why="the working directory is not in a git repository")
    prefix = _git("rev-parse", "--show-prefix", why="the working directory is not in a git repository")
    commit = _git(
        "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", why=f"there is no revision {revision}",
        hint="In a shallow clone fetch it first: `git fetch --depth 1 origin REVISION`.",
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="ddpdoctor-revision-", ignore_cleanup_errors=True) as parent:
        tree = Path(parent).resolve() / Path(top).name
        add = (*_NO_HOOKS, "worktree", "add", "--detach", "--quiet", str(tree), commit)
        _git(*add, why=f"cannot check {revision} out")
        try:
            directory = tree / prefix
            if not directory.is_dir():
                raise UsageError(f"the revision {revision} has no directory {prefix}")
            yield directory
        finally:
            subprocess.run(
                ["git", "-C", top, "worktree", "remove", "--force", str(tree)], capture_output=True, check=False
            )
            subprocess.run(["git", "-C", top, "worktree", "prune"], capture_output=True, check=False)


@contextmanager
def working_in(directory: Path) -> Iterator[None]:
    """Make another directory the working directory for a while."""
    before = os.getcwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


def _git(*arguments: str, why: str, hint: str = "") -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, errors="replace")
    except OSError as error:
        raise UsageError(f"git cannot be run: {error.strerror or error}") from error
    if done.returncode:
        told = done.stderr.strip().splitlines()
        raise UsageError(f"{why}{': ' + told[-1] if told else ''}", hint)
    return done.stdout.rstrip("\n")


_ASK = (
    "import json,sys\n"
    "from importlib import metadata, util\n"
    "found = util.find_spec('torch') is not None\n"
    "try: version = metadata.version('torch') if found else ''\n"
    "except metadata.PackageNotFoundError: version = ''\n"
    "print(json.dumps([sys.executable, found, version]))\n"
)
_ASK_AT_MOST_S = 60.0
_PROJECT_ENVIRONMENTS = (".venv", "venv", ".pixi/envs/default")
_NOTHING_SAID = Launch()


class TorchMissing(DdpDoctorError):
    """No Python with torch was found, so that no rank can be started."""


class Interpreter(msgspec.Struct, frozen=True, kw_only=True):
    """A Python that can run the ranks."""

    path: str
    torch_version: str
    """As its metadata says; empty when they do not."""


def find_interpreter(named: str | None, launch: Launch = _NOTHING_SAID) -> Interpreter:
    """Return the interpreter that the user named, or the launch command's, or ours, or the active environment's.

    Of those that the user did not name by a path, the first that has torch is taken. Raises ``UsageError`` when the
    named one is no Python or has no torch, ``TorchMissing`` when none has torch.
    """
    if named is not None:
        return _named(named, "--python ")
    if launch.must_use_program and launch.program:
        return _named(launch.program, "")
    if launch.program and launch.program != sys.executable:
        answer = _ask(launch.program)
        if answer is not None and answer[1]:
            return Interpreter(path=launch.program, torch_version=answer[2])
    if importlib.util.find_spec("torch") is not None:
        return Interpreter(path=sys.executable, torch_version=_version_here())
    for candidate in _active():
        answer = _ask(candidate)
        if answer is not None and answer[1]:
            return Interpreter(path=candidate, torch_version=answer[2])
    raise TorchMissing(
        "torch is not installed in this environment, so no rank can be started",
        "install torch (pip install torch), activate the training environment, or give its Python with --python",
    )


def has_torch(python: str) -> bool | None:
    """Return whether torch is installed for an interpreter; None when it does not answer."""
    answer = _ask(python)
    return None if answer is None else answer[1]


def search_path(python: str) -> tuple[str, ...]:
    """Return where an interpreter looks for modules; empty when it does not answer."""
    return tuple(answer_of(python, "import json,sys; print(json.dumps(sys.path[1:]))") or ())


def _named(named: str, option: str) -> Interpreter:
    hint = "give the Python of the training environment"
    path = shutil.which(named)
    if path is None and Path(named).is_dir():
        path = shutil.which(str(Path(named) / "bin" / "python"))
        if path is None:
            raise UsageError(f"{option}{named}: a directory without bin/python, so not an environment", hint)
    if path is None:
        raise UsageError(f"{option}{named}: no such program", hint)
    path = os.path.abspath(path)
    answer = _ask(path)
    if answer is None:
        raise UsageError(f"{option}{named}: does not run Python code", hint)
    if not answer[1]:
        raise UsageError(f"{option}{named}: has no torch", "give a Python that has torch, or install torch there")
    return Interpreter(path=path, torch_version=answer[2])


def _active() -> Iterator[str]:
    """Pythons of the environments that the user's shell has active, in the order in which a shell would find them."""
    seen = {os.path.realpath(sys.executable)} if sys.prefix == sys.base_prefix else {sys.executable}
    folders = [os.environ.get(name, "") for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "UV_PROJECT_ENVIRONMENT")]
    folders += map(str, _of_project(Path.cwd()))
    candidates = [os.path.abspath(Path(folder) / "bin" / "python") for folder in folders if folder]
    candidates += [found for name in ("python", "python3") if (found := shutil.which(name))]
    for candidate in candidates:
        if candidate not in seen and os.access(candidate, os.X_OK):
            seen.add(candidate)
            yield candidate


def _of_project(directory: Path) -> Iterator[Path]:
    """Yield where uv, Poetry, PDM, Pixi and people keep a project's environment."""
    for level in (directory, *directory.parents):
        yield from (level / name for name in _PROJECT_ENVIRONMENTS if (level / name).is_dir())
        if (level / "pyproject.toml").exists() or (level / ".git").exists():
            return


def _ask(python: str) -> tuple[str, bool, str] | None:
    """(path, has torch, torch version) of a Python; None when it does not answer."""
    answer = answer_of(python, _ASK)
    return (str(answer[0]), bool(answer[1]), str(answer[2])) if answer is not None and len(answer) == 3 else None


def answer_of(python: str, question: str, *words: str) -> list[Any] | None:
    """Return the list that a program of one line prints as JSON; None where an interpreter does not answer."""
    command = [python, "-c", question, *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_AT_MOST_S, stdin=subprocess.DEVNULL)
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return None
    return answer if isinstance(answer, list) else None


def _version_here() -> str:
    from importlib import metadata

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""
