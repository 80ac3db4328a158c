"""What git says of the project: its commit, and another revision, checked out beside it for as long as it is needed."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddpdoctor.errors import UsageError

_NO_HOOKS = ("-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false")
"""A hook of the project's must not run for a check-out that no one works in."""


_LONGEST_S = 5.0
"""In a repository of millions of files a look for changes may take longer; then nothing is said."""


def commit_of(directory: Path) -> str:
    """Return the commit that a directory is at, with ``-dirty`` where files differ from it; empty where git does not
    tell.
    """
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
