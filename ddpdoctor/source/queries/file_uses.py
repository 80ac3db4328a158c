"""Files that ranks read and write, by the calls of the libraries that training scripts use for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import msgspec

from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ExternalObject, Value, constant
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.job_kind import noted

_OPEN = "builtins.open"
LOG_FILE = "logging.FileHandler"
"""It appends unless it is given another mode."""
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
    "torchvision.utils.save_image": ("fp", 1),
    "matplotlib.pyplot.savefig": ("fname", 0),
    "savefig": ("fname", 0),
    "to_csv": ("path_or_buf", 0),
    "to_parquet": ("path", 0),
    "save_pretrained": ("save_directory", 0),
}
"""The argument that is the path of a new file or directory."""
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
FIGURES = frozenset({"matplotlib.pyplot.savefig", "savefig"})
_SAVE_THEMSELVES = ("tokenizers.", "openpyxl.")
"""Libraries whose objects write themselves to the path that their method ``save`` is given."""
_PATH_WRITERS = frozenset({"write_text", "write_bytes"})
_PATH_READERS = frozenset({"read_text", "read_bytes"})


class FileUse(msgspec.Struct, frozen=True, eq=False):
    """A call that reads or writes a file."""

    event: Event
    path: Value
    node: ast.expr | None
    """The expression of the path; None where it is passed by ``*`` or ``**``."""

    @property
    def source(self) -> str:
        """Source of the path."""
        return self.event.module.excerpt(self.node, 60) if self.node is not None else "the same path"


def writes(projection: Projection) -> Iterator[FileUse]:
    """Yield the files that ranks write from their beginning, in the order of execution."""
    for event in projection.in_course("save", "call"):
        if event.name == _OPEN:
            if _mode(event)[:1] in {"w", "x"}:
                yield from _use(event, "file", 0)
        elif event.name == LOG_FILE:
            if _mode(event, "a")[:1] in {"w", "x"}:
                yield from _use(event, "filename", 0)
        elif event.name in _PATH_WRITERS:
            yield from _use_of_receiver(event)
        elif event.name in _WRITERS:
            yield from _use(event, *_WRITERS[event.name])
        elif event.name == "save" and _saves_itself(event.receiver):
            yield from _use(event, "path", 0)


def _saves_itself(receiver: Value | None) -> bool:
    return isinstance(receiver, ExternalObject) and receiver.name.startswith(_SAVE_THEMSELVES)


def reads(projection: Projection) -> Iterator[FileUse]:
    """Yield the files that ranks read, in the order of execution."""
    for event in noted(projection, _OPEN, *_READERS, *_PATH_READERS):
        if event.name == _OPEN:
            if _mode(event)[:1] == "r" and "+" not in _mode(event):
                yield from _use(event, "file", 0)
        elif event.name in _PATH_READERS:
            yield from _use_of_receiver(event)
        else:
            yield from _use(event, *_READERS[event.name])


def _mode(event: Event, default: str = "r") -> str:
    mode = event.argument("mode", 1)
    text = constant(mode) if mode is not None else default
    return text if isinstance(text, str) else ""


def _use(event: Event, name: str, position: int) -> Iterator[FileUse]:
    path = event.argument(name, position)
    if path is not None and isinstance(event.node, ast.Call):
        words = {entry.arg: entry.value for entry in event.node.keywords}
        node = words.get(name, event.node.args[position] if position < len(event.node.args) else None)
        yield FileUse(event, path, node)


def _use_of_receiver(event: Event) -> Iterator[FileUse]:
    if event.receiver is not None and isinstance(event.node, ast.Call) and isinstance(event.node.func, ast.Attribute):
        yield FileUse(event, event.receiver, event.node.func.value)
