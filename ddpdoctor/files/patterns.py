"""Patterns of paths as in ``.gitignore``: those of Git's own files and those of the settings."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec


class Pattern(msgspec.Struct, frozen=True):
    """One line of a ``.gitignore``."""

    text: str
    """As it was written."""
    segments: tuple[re.Pattern[str] | None, ...]
    """What a path relative to the directory of the pattern consists of; None is any number of directories."""
    negated: bool
    """It takes back what an earlier pattern matched."""
    directories_only: bool


def parse_patterns(lines: Iterable[str]) -> tuple[Pattern, ...]:
    """Read patterns; blank lines, comments, and lines that are no valid pattern are left out."""
    return tuple(pattern for line in lines if (pattern := _parsed(line)) is not None)


def matches(patterns: Sequence[Pattern], path: str, *, directory: bool) -> bool | None:
    """Return whether the last pattern that speaks of ``path`` matches it; None when none does."""
    for pattern in reversed(patterns):
        if (directory or not pattern.directories_only) and _fits(pattern.segments, path.split("/")):
            return not pattern.negated
    return None


def matches_below(patterns: Sequence[Pattern], path: str) -> bool:
    """Return whether a file, or a directory above it, is matched; nothing below a matched directory is taken back."""
    parts = path.split("/")
    for length in range(1, len(parts)):
        if matches(patterns, "/".join(parts[:length]), directory=True):
            return True
    return bool(matches(patterns, path, directory=False))


def _parsed(line: str) -> Pattern | None:
    text = line.rstrip("\r\n")
    text = re.sub(r"(?<!\\)[ \t]+$", "", text)
    if not text or text.startswith("#"):
        return None
    negated = text.startswith("!")
    body = text[1:] if negated else text
    directories_only = body.endswith("/")
    body = body.rstrip("/")
    if not body:
        return None
    anchored = "/" in body
    names = body.lstrip("/").split("/")
    segments: list[re.Pattern[str] | None] = [] if anchored else [None]
    try:
        for place, name in enumerate(names):
            if name == "**" and len(names) > 1:
                segments.append(None)
                if place == len(names) - 1:
                    segments.append(re.compile(".*", re.DOTALL))
            else:
                segments.append(re.compile(_translated(name), re.DOTALL))
    except re.error:
        return None
    return Pattern(text, tuple(segments), negated, directories_only)


def _fits(segments: Sequence[re.Pattern[str] | None], names: Sequence[str]) -> bool:
    """Match name by name. To go back to the last of the places that take any directories is enough, so that no pattern
    needs more time than the product of both lengths.
    """
    segment = name = taken = 0
    back: int | None = None
    while name < len(names):
        expression = segments[segment] if segment < len(segments) else _NEVER
        if expression is None:
            segment += 1
            back, taken = segment, name
        elif expression.fullmatch(names[name]):
            segment += 1
            name += 1
        elif back is None:
            return False
        else:
            taken += 1
            segment, name = back, taken
    return segment == len(segments)


_NEVER = re.compile(r"(?!)")
_PIECE = re.compile(r"(?P<stars>\*+)|(?P<one>\?)|(?P<set>\[[!^]?\]?[^\]]*\])|\\(?P<escaped>.)|(?P<plain>.)", re.DOTALL)


def _translated(name: str) -> str:
    """Return the expression for one name. What stands between two stars is taken where it comes first and for good: a
    star that could give back would try, with n others, every way to divide a name among them.
    """
    chunks = [""]
    for piece in _PIECE.finditer(name):
        kind, text = piece.lastgroup, piece.group()
        if kind == "stars":
            chunks.append("")
        elif kind == "one":
            chunks[-1] += "."
        elif kind == "set":
            inner = re.sub(r"[\\\[&~|]", r"\\\g<0>", text[1:-1]).replace("--", r"-\-")
            chunks[-1] += f"[^{inner[1:]}]" if inner[:1] in "!^" else f"[{inner}]"
        else:
            chunks[-1] += re.escape(piece.group("escaped") or text)
    if len(chunks) == 1:
        return chunks[0]
    first, *middle, last = chunks
    taken = "".join(f"(?=(?P<c{number}>.*?{chunk}))(?P=c{number})" for number, chunk in enumerate(middle) if chunk)
    return f"{first}{taken}.*{last}"


# Finds the Python files of a directory that are the project's own, and the user's home.

SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages", "venv", "env", "__pypackages__"})
"""Directories that are no project's own, besides hidden ones and virtual environments."""


class _Ignore(msgspec.Struct, frozen=True):
    directory: str
    patterns: tuple[Pattern, ...]


def home_directory() -> Path | None:
    """Return the user's home: HOME, or what the system says where that is no absolute path; None when neither knows."""
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
