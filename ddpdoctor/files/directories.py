"""Finds the Python files of a directory that are the project's own, and the user's home."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ddpdoctor.files.patterns import Pattern, matches, parse_patterns

SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages", "venv", "env", "__pypackages__"})
"""Directories that are no project's own, besides hidden ones and virtual environments."""


class _Ignore(msgspec.Struct, frozen=True):
    directory: str
    patterns: tuple[Pattern, ...]


def home_directory() -> Path | None:
    """Return the user's home: what HOME says, or, where that is no absolute path, the system; None when neither knows
    one.
    """
    named = os.path.expanduser("~")
    if not os.path.isabs(named):
        import pwd

        try:
            named = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            return None
    return Path(named) if os.path.isabs(named) else None


def python_files(directory: Path) -> Iterator[Path]:
    """Yield the Python files below ``directory``, an absolute path, in order of their names.

    Left out are hidden directories, virtual environments, what a ``.gitignore`` in the directory, below it, or above it
    in the same repository excludes, and directories behind symbolic links (a loop of links would have no end).
    """
    yield from _below(str(directory), list(_ignores_above(directory)))


def _below(directory: str, ignores: Sequence[_Ignore]) -> Iterator[Path]:
    try:
        with os.scandir(directory) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
    except OSError:
        return
    names = {entry.name for entry in entries}
    if "pyvenv.cfg" in names or "conda-meta" in names:
        return
    if ".gitignore" in names:
        ignores = [*ignores, *_ignore_file(directory)]
    inner: list[str] = []
    for entry in entries:
        try:
            is_directory = entry.is_dir(follow_symlinks=False)
            is_source = entry.name.endswith((".py", ".pyw")) and entry.is_file()
        except OSError:
            continue
        if entry.name.startswith(".") or not (is_directory or is_source):
            continue
        if is_directory and entry.name in SKIPPED and (entry.name != "env" or _is_environment(entry.path)):
            continue
        if _ignored(entry.path, ignores, directory=is_directory):
            continue
        if is_directory:
            inner.append(entry.path)
        else:
            yield Path(entry.path)
    for path in inner:
        yield from _below(path, ignores)


def _is_environment(path: str) -> bool:
    return os.path.exists(os.path.join(path, "pyvenv.cfg")) or os.path.isdir(os.path.join(path, "bin"))


def _ignored(path: str, ignores: Sequence[_Ignore], *, directory: bool) -> bool:
    for ignore in reversed(ignores):
        relative = os.path.relpath(path, ignore.directory).replace(os.sep, "/")
        verdict = matches(ignore.patterns, relative, directory=directory)
        if verdict is not None:
            return verdict
    return False


def _ignores_above(directory: Path) -> Iterator[_Ignore]:
    """Yield the files of the directories above, as far as the top of the repository; none outside of a repository."""
    above: list[Path] = []
    for parent in (directory, *directory.parents):
        if (parent / ".git").exists():
            for place in reversed(above):
                yield from _ignore_file(str(place))
            return
        above = [*above, parent.parent]


def _ignore_file(directory: str) -> Iterator[_Ignore]:
    path = os.path.join(directory, ".gitignore")
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as stream:
            yield _Ignore(directory, parse_patterns(stream))
    except OSError:
        return
