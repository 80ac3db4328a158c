"""Files that ranks read and write, by the calls of the libraries that scripts use for it, and what ranks share."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from ddpdoctor.files import regex
from ddpdoctor.source.events import LONGEST_CONDITION, Event, Guard
from ddpdoctor.source.interpreter.operators import QUOTIENT
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    STAMP,
    Const,
    ExternalObject,
    PerRank,
    Unknown,
    Value,
    constant,
    is_varying,
    options_of,
    tags_of,
)
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.divergence import is_in_turns
from ddpdoctor.source.queries.job_kind import (
    hints_at_ranks,
    is_distributed,
    is_of_one_process,
    left_in_mode,
    noted,
    on_every_rank,
)
from ddpdoctor.source.ranks.rank_local_values import OWN_KINDS
from ddpdoctor.source.ranks.ranks import LOCAL_RANK, numbers_in, rank_names
from ddpdoctor.source.script.module import argument_of, descend, last_name, made_from
from ddpdoctor.source.torch_model.recorded_calls import FILE_METHODS
from ddpdoctor.source.vocabulary import text_hints_at_ranks

LOG_FILE, LOG_SET_UP = "logging.FileHandler", "logging.basicConfig"
"""They append unless they are given another mode."""
OPENERS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("builtins.open", "io.open"), ("file", "r")),
    **dict.fromkeys(("codecs.open", "gzip.open", "bz2.open", "lzma.open"), ("filename", "r")),
    **dict.fromkeys((LOG_FILE, LOG_SET_UP), ("filename", "a")),
}
"""What opens a file: the argument that is its path, which comes first, and the mode by default."""
# The argument that is the path of a new file or directory.
_WRITERS: Mapping[str, tuple[str, int]] = {
    "torch.save": ("f", 1),
    "numpy.save": ("file", 0),
    "numpy.savez": ("file", 0),
    "numpy.savetxt": ("fname", 0),
    "joblib.dump": ("filename", 1),
    "safetensors.torch.save_file": ("filename", 1),
    "shutil.copy": ("dst", 1),
    "shutil.copy2": ("dst", 1),
    "shutil.copyfile": ("dst", 1),
    "shutil.move": ("dst", 1),
    "torchvision.utils.save_image": ("fp", 1),
    "matplotlib.pyplot.savefig": ("fname", 0),
    "savefig": ("fname", 0),
    "to_csv": ("path_or_buf", 0),
    "to_parquet": ("path", 0),
    "save_pretrained": ("save_directory", 0),
    "save_to_disk": ("dataset_path", 0),
}
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
# Functions that map a file into memory: where their mode stands, and what it is by default. `w+` makes the file anew.
_MAPPERS: Mapping[str, tuple[int, str]] = {"numpy.memmap": (2, "r+"), "numpy.lib.format.open_memmap": (1, "r+")}
FIGURES = frozenset({"matplotlib.pyplot.savefig", "savefig"})
# Libraries whose objects write themselves to the path that their method `save` is given.
_SAVE_THEMSELVES = ("tokenizers.", "openpyxl.")
ASKS_FOR_A_FILE = frozenset({"exists", "isfile", "is_file"})
"""The last names of what os.path and pathlib ask with whether a file is there."""
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

    @property
    def shown(self) -> str:
        """The path for a sentence."""
        return shown_path(self.source, self.path)


def shown_path(source: str, path: Value) -> str:
    """Return a path as it is written, or what it is where a variable has it."""
    text = constant(path) if source.isidentifier() else ...
    return f'"{text}"' if isinstance(text, str) else source


def writes(projection: Projection) -> Iterator[FileUse]:
    """Yield the files that ranks write from their beginning, in the order of execution."""
    for event in projection.in_course("save", "call"):
        if event.name in OPENERS:
            name, default = OPENERS[event.name]
            if _mode(event, default)[:1] in {"w", "x"}:
                yield from _use(event, name, 0)
        elif event.name in _MAPPERS:
            if _mapped(event) == "w+":
                yield from _use(event, "filename", 0)
        elif event.name in _PATH_WRITERS:
            yield from _use_of_receiver(event)
        elif event.name in _WRITERS:
            yield from _use(event, *_WRITERS[event.name])
        elif event.name == "save" and getattr(event.receiver, "name", "").startswith(_SAVE_THEMSELVES):
            yield from _use(event, "path", 0)


def appended_files(projection: Projection) -> Iterator[FileUse]:
    """Yield the files that every rank of a job adds the same lines to, with no word for the rank in them, each once."""
    seen: set[ast.AST] = set()
    for event in noted(projection, *OPENERS) if is_distributed(projection) else ():
        is_log = event.name in (LOG_FILE, LOG_SET_UP)
        if is_log or event.node in seen or not on_every_rank(event) or _mode(event)[:1] != "a":
            continue
        for use in _use(event, OPENERS[event.name][0], 0):
            if not is_one_path(use.path) or is_in_turns(projection, event) or is_of_one_process(projection, event):
                continue
            around = event.module.body_around(event.node)
            calls = [
                call
                for call in event.module.index.within(around, ast.Call)
                if last_name(call.func) in ("write", "writelines", "writerow", "dump")
            ]
            written = [event.module.excerpt(call, LONGEST_CONDITION) for call in calls]
            named = {node.id for call in calls for node in ast.walk(call) if isinstance(node, ast.Name)}
            if named & rank_names(projection.machine.store) or any(map(text_hints_at_ranks, (use.source, *written))):
                continue
            if left_in_mode(projection, event) is None:
                seen.add(event.node)
                yield use


def reads(projection: Projection) -> Iterator[FileUse]:
    """Yield the files that ranks read, in the order of execution."""
    for event in noted(projection, *OPENERS, *_READERS, *_PATH_READERS, *_MAPPERS):
        if event.name in OPENERS:
            name, default = OPENERS[event.name]
            if _mode(event, default)[:1] == "r" and "+" not in _mode(event, default):
                yield from _use(event, name, 0)
        elif event.name in _MAPPERS:
            if _mapped(event) in {"r", "r+", "c"}:
                yield from _use(event, "filename", 0)
        elif event.name in _PATH_READERS:
            yield from _use_of_receiver(event)
        else:
            yield from _use(event, *_READERS[event.name])


def _mapped(event: Event) -> str:
    position, default = _MAPPERS[event.name]
    return _mode(event, default, position)


def _mode(event: Event, default: str = "r", position: int = 1) -> str:
    mode = event.named.get("filemode") if event.name == LOG_SET_UP else event.argument("mode", position)
    text = constant(mode) if mode is not None else default
    return text if isinstance(text, str) else ""


def _use(event: Event, name: str, position: int) -> Iterator[FileUse]:
    path = event.argument(name, position)
    if path is not None and isinstance(event.node, ast.Call):
        yield FileUse(event, path, path_in(event, name, position))


def path_in(event: Event, name: str, position: int) -> ast.expr | None:
    """Return the expression of the path that a call is given, or whose method it is; None where a star hides it."""
    call = event.node
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and len(event.positional) > len(call.args):
        return call.func.value
    return argument_of(call, name, position)


def _use_of_receiver(event: Event) -> Iterator[FileUse]:
    if event.receiver is not None and isinstance(event.node, ast.Call) and isinstance(event.node.func, ast.Attribute):
        yield FileUse(event, event.receiver, event.node.func.value)


def opened_to_write(projection: Projection) -> Iterator[FileUse]:
    """Yield the files that ranks make where they are missing: written from their beginning or added to."""
    yield from writes(projection)
    for event in noted(projection, *OPENERS):
        name, default = OPENERS[event.name]
        if _mode(event, default)[:1] == "a":
            yield from _use(event, name, 0)


def changed_path(event: Event) -> Value | None:
    """Return the path that a call of ``FILE_CALLS`` or ``FILE_METHODS`` makes, removes or renames."""
    if event.name in FILE_METHODS:
        return event.receiver
    if event.name == "os.symlink":
        return event.argument("dst", 1)
    return event.argument("name" if event.name == "os.makedirs" else "path", 0) or event.argument("src", 0)


def changed_node(event: Event) -> ast.expr | None:
    """Return the expression of that path."""
    call = event.node
    if not isinstance(call, ast.Call):
        return None
    if event.name in FILE_METHODS and isinstance(call.func, ast.Attribute):
        return call.func.value
    places = call.args[1:] if event.name == "os.symlink" else call.args
    return places[0] if places else call.keywords[0].value if call.keywords else None


def directory_of(path: ast.expr) -> ast.expr | None:
    """Return the source of the directory that a path lies in: ``join(a, b)``, ``f"{a}/{b}"``, ``a / b``, ``a + b``."""
    if isinstance(path, ast.Call) and last_name(path.func) == "join" and path.args:
        return path.args[0]
    if isinstance(path, ast.BinOp) and isinstance(path.op, (ast.Div, ast.Add)):
        return path.left
    first = path.values[0] if isinstance(path, ast.JoinedStr) and path.values else None
    return first.value if isinstance(first, ast.FormattedValue) else None


_IN_MEMORY = ("io.", "tempfile.")
_PASSING = regex(r"log|lock|cache|te?mp|rank|pid|host|node|devnull|stdout|stderr", re.IGNORECASE)


class SharedSave(msgspec.Struct, frozen=True, eq=False):
    """A write that several ranks reach with the same path."""

    event: Event
    by: Literal["all", "local-rank"]
    """Every rank writes, or the first rank of every node, because the local rank decides."""
    path: str
    """Source of the path argument."""
    guard: Guard | None
    """The test of the local rank; or the one that lets these ranks write here, and all others elsewhere."""


def shared_saves(projection: Projection) -> Iterator[SharedSave]:
    """Yield files that more than one rank of a job writes under one path, with no hint of a rank test around the call.

    Of a function that is called behind a test of the local rank and also without one, it is the call without.
    """
    if not is_distributed(projection):
        return
    found: dict[tuple[str, str, str], SharedSave] = {}
    for use in writes(projection):
        event = use.event
        place = str(event.module.path), event.function, use.source
        if event.in_parent or not _is_result(use) or (place in found and found[place].by == "all"):
            continue
        if len(numbers_in(event.ranks)) < 2 or not is_one_path(use.path):
            continue
        if hints_at_ranks(event) or is_of_one_process(projection, event) or is_in_turns(projection, event):
            continue
        before = _guard_that_others_left_by(projection, event)
        guard = _local_guard(event, before)
        if not event.guards and before is None:
            found[place] = SharedSave(event, "all", use.shown, None)
        elif guard is not None:
            found.setdefault(place, SharedSave(event, "local-rank", use.shown, guard))
    yield from found.values()
    yield from _saves_in_both_arms(projection)


def _saves_in_both_arms(projection: Projection) -> Iterator[SharedSave]:
    """Yield the write of some ranks where all other ranks write to the same path in the other arm of one condition."""
    by_arm: dict[tuple[ast.AST, str], list[FileUse]] = {}
    for use in writes(projection):
        event = use.event
        if len(event.guards) == 1 and _is_result(use) and is_one_path(use.path) and not event.in_parent:
            by_arm.setdefault((event.guards[0].node, use.source), []).append(use)
    for uses in by_arm.values():
        first, second = uses[0], uses[-1]
        apart = not first.event.ranks & second.event.ranks and not is_in_turns(projection, second.event)
        if apart and first.event.ranks | second.event.ranks == ALL_RANKS and is_one_file(projection, first, second):
            yield SharedSave(second.event, "all", second.shown, second.event.guards[0])


def is_one_file(projection: Projection, one: FileUse, other: FileUse) -> bool:
    """Return whether the paths of two uses are the same text, or made of the same values in the same way."""
    if isinstance(constant(one.path), str) or isinstance(constant(other.path), str):
        return constant(one.path) == constant(other.path)
    if one.node is None or other.node is None or one.path != other.path:
        return False
    from ddpdoctor.source.queries.spelled_paths import MOST_FRAMES, spelled

    frames = 1 if one.event.scopes == other.event.scopes else MOST_FRAMES  # In one call the variables are the same.
    written = spelled(projection, one.event, one.node, frames)
    return bool(written) and written == spelled(projection, other.event, other.node, frames)


def saves_by_guard(projection: Projection) -> list[list[SharedSave]]:
    """Return the saves that a test of the local rank decides about, those of one test together.

    Data that the first rank of a node prepares for the other ranks of the node is left out.
    """
    found: dict[ast.AST, list[SharedSave]] = {}
    for save in shared_saves(projection):
        if save.by == "local-rank" and save.guard is not None and not _is_for_its_node(projection, save):
            found.setdefault(save.guard.node, []).append(save)
    return list(found.values())


def _is_for_its_node(projection: Projection, save: SharedSave) -> bool:
    """Return whether the function reads the same file on the other ranks too, and it holds no state of the training."""
    event = save.event
    content = made_from(event.node, event.module.body_around(event.node))
    if any(isinstance(node, ast.Attribute) and node.attr == "state_dict" for node in content):
        return False
    return any(
        use.shown == save.path
        and use.event.module is event.module
        and use.event.function == event.function
        and use.event.ranks & ~event.ranks
        for use in reads(projection)
    )


def is_one_path(path: Value) -> bool:
    """Return whether a path is certainly the same on every rank and names a file."""
    for option in options_of(path):
        if is_varying(option) or (isinstance(option, Unknown) and option.opaque):
            return False
        if isinstance(option, ExternalObject) and option.name.startswith(_IN_MEMORY):
            return False
    return not is_varying(path)


def is_stamped(path: Value) -> bool:
    """Return whether a path is another one on each rank by the second at most in which it was made."""
    own = {tag for tag in tags_of(path) if tag[0] in OWN_KINDS and tag[0] != "files"}
    return isinstance(path, Unknown) and own == {STAMP}


def _guard_that_others_left_by(projection: Projection, event: Event) -> Guard | None:
    """Return the test behind which the other ranks left a function around the event: ``if local_rank != 0: return``."""
    if event.ranks == ALL_RANKS:
        return left_in_mode(projection, event)
    for left in reversed(projection.exits):
        if left.ordinal < event.ordinal and left.scope in event.scopes and not left.ranks & event.ranks:
            return left.guard
    return None


def _local_guard(event: Event, before: Guard | None) -> Guard | None:
    """Return the test that lets through only the first rank of every node; `rank % gpus == 0` means just that."""
    if numbers_in(event.ranks) != tuple(rank for rank, local in enumerate(LOCAL_RANK) if local == 0):
        return None
    passing = [(guard, guard.arm) for guard in reversed(event.guards)]
    if before is not None:
        passing.append((before, ALL_RANKS & ~before.arm))
    for guard, arm in passing:
        divides = any(
            isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and text_hints_at_ranks(ast.unparse(node.left))
            for node in descend(guard.node)
        )
        if not divides and numbers_in(arm) == numbers_in(event.ranks) and isinstance(guard.value, PerRank):
            outside = [value for rank, value in enumerate(guard.value.values) if not arm >> rank & 1]
            if any(QUOTIENT & tags_of(value) for value in guard.value.values):
                continue  # The number of the node is tested, too.
            if all(isinstance(value, Const) for value in outside):
                return guard
    return None


def _is_result(use: FileUse) -> bool:
    """Return whether what is written is for later, and by each rank that calls it.

    Logs, pictures, caches and locks are not for later.
    """
    event = use.event
    if event.name in FIGURES or event.name in OPENERS or event.name.startswith("shutil."):
        return False
    if event.name == "torch.save":
        return True
    by_each = "is_main_process" not in event.named and "save_function" not in event.named
    return by_each and not _PASSING.search(use.source)
