"""The file that a project commits: what its scripts needed, reached and were known to have wrong when it was agreed on.

One entry a target, each with a digest: a budget that someone raised by hand would let through what it is there to
stop, so an entry that is not as it was written is refused.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import msgspec

from ddpdoctor import __version__
from ddpdoctor.errors import UsageError
from ddpdoctor.files.replace_file import replace_file
from ddpdoctor.files.untrusted import quoted, read_start, read_untrusted, reason_of
from ddpdoctor.gate.budget import Budget
from ddpdoctor.gate.reach import Reach

DEFAULT_FILE = "ddpdoctor-baseline.json"
FORMAT = 1
LARGEST_BYTES = 50_000_000
_UPDATE = "`ddpdoctor gate --update` rewrites it."
_OTHER = "Choose another file with `--baseline`."
Decoded = TypeVar("Decoded", bound=msgspec.Struct)


class Rehearsed(msgspec.Struct, frozen=True, kw_only=True):
    """How a target was rehearsed: budgets of other ranks, batches or devices cannot be compared."""

    ranks: int
    layout: str
    device: str
    batches: int
    batch_size: str
    """Samples that batches were cut to; empty when they were kept."""


class KnownFinding(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A finding that was accepted."""

    fingerprint: str
    code: str
    shown: str
    """Where it was, and what: for people."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What was agreed on for one target."""

    rehearsed: Rehearsed
    torch: str = ""
    findings: tuple[KnownFinding, ...] = ()
    budget: Budget = Budget()
    reach: Reach | None = None
    equivalence: str | msgspec.UnsetType = msgspec.UNSET
    """Whether the ranks trained what one process would; where that was asked, it is asked again."""


class _Sealed(msgspec.Struct, frozen=True, kw_only=True):
    digest: str
    entry: Entry


class _Tool(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    version: str = ""


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    tool: _Tool
    format: int


class _File(_Head, frozen=True, kw_only=True):
    targets: dict[str, _Sealed] = {}


def read_baseline(file: Path) -> dict[str, Entry] | None:
    """Return the entries by target; None when there is no such file.

    Raises UsageError for a file that is none of ours, of another version, damaged, or edited.
    """
    document = _document(file)
    if document is None:
        return None
    for target, sealed in document.targets.items():
        if sealed.digest != _digest(sealed.entry):
            raise UsageError(f"{file}: the entry of `{quoted(target)}` was edited by hand", f"Undo that, or: {_UPDATE}")
    return {target: sealed.entry for target, sealed in document.targets.items()}


def _document(file: Path) -> _File | None:
    try:
        content = read_untrusted(file, LARGEST_BYTES)
    except FileNotFoundError as error:
        if file.is_symlink():
            raise UsageError(f"the baseline {file} is a link to nothing", _OTHER) from error
        return None
    except OSError as error:
        raise UsageError(f"the baseline {file} cannot be read: {reason_of(error)}", _OTHER) from error
    if b"<<<<<<<" in content and b">>>>>>>" in content:
        raise UsageError(f"{file} holds a merge conflict", f"Take either side, then: {_UPDATE}")
    head = _decoded(content, _Head, file)
    if head.tool.name != "ddpdoctor":
        raise UsageError(f"{file} is not a ddpdoctor baseline", _OTHER)
    if head.format != FORMAT:
        age = "a newer" if head.format > FORMAT else "an older"
        raise UsageError(
            f"{file} was written by {age} ddpdoctor, {quoted(head.tool.version)}: its format is {quoted(head.format)}, "
            f"not {FORMAT}",
            f"Use the same version, or: {_UPDATE}",
        )
    return _decoded(content, _File, file)


def write_entries(file: Path, entries: Mapping[str, Entry | None]) -> None:
    """Put entries into a baseline file, and take those out that are None; others stay, also what another gate writes.

    Raises UsageError when the file is not ours to replace, or cannot be written.
    """
    refuse_unwritable(file)
    try:
        with _alone(file.absolute().parent):
            kept = _kept(file)
            before = file.stat() if file.exists() else None
            kept.update({target: entry for target, entry in entries.items() if entry is not None})
            for target in [target for target, entry in entries.items() if entry is None]:
                kept.pop(target, None)
            replace_file(os.path.realpath(file), encoded(kept), before)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror or error}") from error


def refuse_unwritable(file: Path) -> None:
    """Raise UsageError for what must not, or cannot, be written."""
    if not os.path.lexists(file):
        parent = file.absolute().parent
        if not parent.is_dir():
            raise UsageError(f"cannot write {file}: there is no directory {parent}")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise UsageError(f"cannot write {file}: the directory {parent} is read-only")
        return
    if not file.is_file():
        raise UsageError(f"cannot write {file}: it is not a regular file")
    if not os.access(file, os.W_OK):
        raise UsageError(f"cannot write {file}: it is read-only")
    start = read_start(file, 200)
    if start and b'"ddpdoctor"' not in start:
        raise UsageError(
            f"cannot write {file}: it exists, and is not a ddpdoctor baseline", "Choose another one with `--baseline`."
        )


def encoded(entries: Mapping[str, Entry]) -> bytes:
    """Return the content of a baseline file: sorted, indented, and the same for the same entries."""
    document = _File(
        tool=_Tool(name="ddpdoctor", version=__version__),
        format=FORMAT,
        targets={target: _Sealed(digest=_digest(entries[target]), entry=entries[target]) for target in sorted(entries)},
    )
    return _readable(document) + b"\n"


def _readable(document: _File) -> bytes:
    """JSON with a line a share and a function, so that a reviewer can read what changed."""
    import json

    plain = msgspec.to_builtins(document)
    lines: list[str] = []

    def write(value: object, indent: int, prefix: str, comma: str) -> None:
        flat = json.dumps(value, ensure_ascii=False, sort_keys=False)
        if not isinstance(value, (dict, list, tuple)) or (len(flat) <= 100 and indent > 1) or indent > 5 or not value:
            lines.append(f"{'  ' * indent}{prefix}{flat}{comma}")
            return
        opening, closing = ("{", "}") if isinstance(value, dict) else ("[", "]")
        lines.append(f"{'  ' * indent}{prefix}{opening}")
        pairs = list(value.items()) if isinstance(value, dict) else [(None, item) for item in value]
        for number, (key, item) in enumerate(pairs):
            name = "" if key is None else f"{json.dumps(key, ensure_ascii=False)}: "
            write(item, indent + 1, name, "," if number + 1 < len(pairs) else "")
        lines.append(f"{'  ' * indent}{closing}{comma}")

    write(plain, 0, "", "")
    return "\n".join(lines).encode("utf-8", "backslashreplace")


def _kept(file: Path) -> dict[str, Entry]:
    """Return the entries that stay: those that can be read and were not edited; of the others the user was told."""
    try:
        document = _document(file)
    except UsageError:
        return {}
    sealed = document.targets if document is not None else {}
    return {target: one.entry for target, one in sealed.items() if one.digest == _digest(one.entry)}


def _digest(entry: Entry) -> str:
    return sha256(msgspec.json.encode(entry)).hexdigest()[:16]


def _decoded(content: bytes, kind: type[Decoded], file: Path) -> Decoded:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{file} is not a readable baseline: {quoted(error)}", _UPDATE) from error


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Keep other gates from writing in this directory meanwhile; ends with the process, whatever happens."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
