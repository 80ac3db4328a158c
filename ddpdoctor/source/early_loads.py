"""Files that one rank writes and others read at once, without waiting for it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

import msgspec

from ddpdoctor.source.job import framework, noted
from ddpdoctor.source.loads import may_be_one_path
from ddpdoctor.source.nodes import last_name
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.saving import is_distributed
from ddpdoctor.source.trace import Event
from ddpdoctor.source.values import ALL_LANES, Value, constant

_WAITS = re.compile(r"barrier|synchron|wait_for|wait_all|sync_proc", re.IGNORECASE)
_OPEN = "builtins.open"
_WRITERS: Mapping[str, tuple[str, int]] = {
    "torch.save": ("f", 1),
    "numpy.save": ("file", 0),
    "numpy.savez": ("file", 0),
    "numpy.savetxt": ("fname", 0),
    "joblib.dump": ("filename", 1),
    "safetensors.torch.save_file": ("filename", 1),
    "shutil.copy": ("dst", 1),
    "shutil.copyfile": ("dst", 1),
    "shutil.move": ("dst", 1),
    "to_csv": ("path_or_buf", 0),
    "to_parquet": ("path", 0),
}
"""The argument that is the path of a new file."""
_READERS: Mapping[str, tuple[str, int]] = {
    "torch.load": ("f", 0),
    "numpy.load": ("file", 0),
    "numpy.loadtxt": ("fname", 0),
    "joblib.load": ("filename", 0),
    "safetensors.torch.load_file": ("filename", 0),
    "pandas.read_csv": ("filepath_or_buffer", 0),
    "pandas.read_parquet": ("path", 0),
    "pandas.read_json": ("path_or_buf", 0),
    "pandas.read_pickle": ("filepath_or_buffer", 0),
}
_PATH_WRITERS = frozenset({"write_text", "write_bytes"})
_PATH_READERS = frozenset({"read_text", "read_bytes"})


class FileUse(msgspec.Struct, frozen=True, eq=False):
    """A call that reads or writes a file."""

    event: Event
    path: Value
    source: str
    """Source of the path."""


class EarlyLoad(msgspec.Struct, frozen=True, eq=False):
    """A read of a file that one rank has just begun to write."""

    load: Event
    save: Event
    path: str
    """Source of the path."""


def early_loads(projection: Projection) -> Iterator[EarlyLoad]:
    """Reads on ranks that do not wait for the rank that writes the same path before."""
    if not is_distributed(projection) or framework(projection.machine.script):
        return
    saves = [use for use in writes(projection) if not use.event.ranks & (use.event.ranks - 1)]
    if not saves or _waits_somewhere_unknown(projection):
        return
    waits = list(projection.in_course("collective", "wrap", "forward", "backward"))
    seen: set[ast.AST] = set()
    for load in _reads(projection):
        if load.event.node in seen or not may_be_one_path(load.event, load.path):
            continue
        for save in reversed(saves):
            if save.event.ordinal < load.event.ordinal and save.event.root == load.event.root and _same(save, load):
                if not any(_is_between(save.event, wait, load.event) for wait in waits):
                    seen.add(load.event.node)
                    yield EarlyLoad(load.event, save.event, load.source)
                break


def writes(projection: Projection) -> Iterator[FileUse]:
    """The files that ranks write from their beginning, in the order of execution."""
    for event in projection.in_course("save", "call"):
        if event.name == _OPEN:
            if _mode(event)[:1] in {"w", "x"}:
                yield from _use(event, "file", 0)
        elif event.name in _PATH_WRITERS:
            yield from _use_of_receiver(event)
        elif event.name in _WRITERS:
            yield from _use(event, *_WRITERS[event.name])


def _reads(projection: Projection) -> Iterator[FileUse]:
    for event in noted(projection, _OPEN, *_READERS, *_PATH_READERS):
        if event.name == _OPEN:
            if _mode(event)[:1] == "r" and "+" not in _mode(event):
                yield from _use(event, "file", 0)
        elif event.name in _PATH_READERS:
            yield from _use_of_receiver(event)
        else:
            yield from _use(event, *_READERS[event.name])


def _mode(event: Event) -> str:
    mode = event.argument("mode", 1)
    text = constant(mode) if mode is not None else "r"
    return text if isinstance(text, str) else ""


def _use(event: Event, name: str, position: int) -> Iterator[FileUse]:
    path = event.argument(name, position)
    if path is not None and isinstance(event.node, ast.Call):
        words = {entry.arg: entry.value for entry in event.node.keywords}
        node = words.get(name, event.node.args[position] if position < len(event.node.args) else None)
        if node is not None:
            yield FileUse(event, path, event.module.excerpt(node, 60))


def _use_of_receiver(event: Event) -> Iterator[FileUse]:
    if event.receiver is not None and isinstance(event.node, ast.Call) and isinstance(event.node.func, ast.Attribute):
        yield FileUse(event, event.receiver, event.module.excerpt(event.node.func.value, 60))


def _same(save: FileUse, load: FileUse) -> bool:
    one, other = save.path, load.path
    if isinstance(constant(one), str) or isinstance(constant(other), str):
        return constant(one) == constant(other)
    return one == other and save.event.scopes == load.event.scopes and save.source == load.source


def _is_between(save: Event, wait: Event, load: Event) -> bool:
    return save.ordinal < wait.ordinal < load.ordinal and wait.ranks == ALL_LANES


def _waits_somewhere_unknown(projection: Projection) -> bool:
    """Whether something is called by a name that promises to wait, and was not seen to be a collective."""
    known = {event.node for event in projection.events if event.kind == "collective"}
    for module in projection.machine.script.modules:
        for node in module.index.of(ast.Call):
            last = last_name(node.func)
            if not _WAITS.search(last) or node in known or module.resolve(node.func).startswith("torch."):
                continue
            if last not in projection.machine.mentions.synchronising:
                return True
    return False
