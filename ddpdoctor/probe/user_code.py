"""Which code is the user's, and where in it something was called."""

from __future__ import annotations

import ast
import functools
import linecache
import opcode
import os
import sys
import sysconfig
import threading
from collections.abc import Container, Iterable, Iterator
from itertools import islice
from math import prod
from traceback import walk_tb
from types import CodeType, FrameType, TracebackType
from typing import Any, Optional
from weakref import WeakKeyDictionary

# What a collective is, alike in every record: who issued it, and the fields of its signature.

_ENDINGS = (
    ("torch/nn/parallel/distributed.py", "ddp"),
    ("torch/distributed/algorithms/join.py", "join"),
    # Of fully_shard, where torch keeps it now and until 2.5, and of FullyShardedDataParallel.
    ("fsdp/_fully_shard/_fsdp_param_group.py", "fsdp"),
    ("fsdp/_fully_shard/_fsdp_state.py", "fsdp"),
    ("_composable/fsdp/_fsdp_param_group.py", "fsdp"),
    ("_composable/fsdp/_fsdp_state.py", "fsdp"),
    ("distributed/fsdp/_runtime_utils.py", "fsdp"),
)
_BEFORE_FORWARD = frozenset({"pre_forward", "_pre_forward", "_pre_forward_unshard"})
_parts: dict[str, str] = {}


def origin_of(frames: Iterable[tuple[str, str]]) -> str:
    """Return who issued a collective, by file and function of the frames that led to it, innermost first.

    It is the user, ``join()``, or a moment of DDP or of sharding; one of the module that DDP wraps is the user's. In a
    backward it is DDP's reducer: nothing of Python's stands between autograd and the collective.
    """
    is_innermost, in_ddp, in_forward = True, False, False
    for file, qualified in frames:
        part, function = _part_of(file), qualified.rpartition(".")[2]
        if is_innermost and part == "autograd":
            return "ddp-backward"
        is_innermost = False
        if in_ddp and part != "ddp":
            return "ddp-forward"
        if part == "fsdp":
            if "backward" in function or function == "_reduce_grad":
                return "fsdp-backward"
            in_forward = in_forward or function in _BEFORE_FORWARD
        elif in_forward and part in ("", "autograd"):
            return "fsdp-forward"
        if part == "":
            return "user"
        if part == "join":
            return "join"
        if part == "ddp":
            if function == "__init__":
                return "ddp-construct"
            if not in_ddp and function in ("_run_ddp_forward", "forward"):
                return "user"
            in_ddp = True
    if is_innermost:
        return "ddp-backward"
    return "fsdp-forward" if in_forward else "ddp-forward" if in_ddp else "user"


def sharded_module(frame: Optional[FrameType]) -> str:
    """Return the name of the module whose shards a collective moves, as far as the frames that led to it tell."""
    for one in outwards(frame):
        if one.f_code.co_filename.endswith("_fsdp_param_group.py"):
            group = one.f_locals.get("self")
            name = getattr(group, "_module_fqn", None)
            modules = getattr(group, "modules", ())
            if name or not modules:
                return str(name or "")
            return type(modules[0]).__name__.partition("FSDP")[2]
    return ""


def described(
    kind: str,
    shapes: list[tuple[int, ...]],
    dtype: str,
    size_bytes: int,
    origin: str,
    *,
    reduce_op: str = "",
    root: Optional[int] = None,
) -> dict[str, Any]:
    """Return the fields of a signature."""
    return {
        "kind": kind,
        "shapes": shapes,
        "numels": list(map(prod, shapes)),
        "dtype": dtype,
        "reduce_op": reduce_op,
        "root": root,
        "size_bytes": size_bytes,
        "origin": origin,
    }


def _part_of(file: str) -> str:
    """Return the part of torch that a file belongs to, empty for other files; looked up once a file."""
    part = _parts.get(file)
    if part is None:
        part = next((part for ending, part in _ENDINGS if file.endswith(ending)), "torch")
        part = "autograd" if "/torch/autograd/" in f"/{file}" else part if "/torch/" in f"/{file}" else ""
        _parts[file] = part
    return part


FrameTuple = tuple[str, int, str]
"""File, line, function."""

_MOST_FRAMES = 16
_INSTALLED = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)


class UserCode:
    """Which files are the user's, remembered for each file."""

    def __init__(self, project_root: str) -> None:
        ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        paths = sysconfig.get_paths()
        libraries = {os.path.realpath(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
        standard = {paths[name] for name in ("stdlib", "platstdlib")}
        self._standard = tuple(path + os.sep for path in sorted(standard | set(map(os.path.realpath, standard))))
        self._ours = os.path.realpath(ours) + os.sep
        self._libraries = tuple(path + os.sep for path in sorted(libraries))
        self._root = os.path.realpath(project_root) + os.sep if project_root else ""
        self._known: dict[str, str] = {}
        """Absolute path of each file of the user's, an empty string for the others."""
        self._starts: WeakKeyDictionary[threading.Thread, tuple[FrameTuple, ...]] = WeakKeyDictionary()
        """The user's lines that started a thread, which may run nothing of the user's, as that of a checkpoint."""

    def holds(self, filename: str) -> bool:
        """Return whether the file is the user's."""
        return bool(self._path_of(filename))

    def is_standard_library(self, filename: str) -> bool:
        """Return whether the file is one of Python's own."""
        return filename.startswith(self._standard) and not any(part in filename for part in _INSTALLED)

    def has_module(self, name: str) -> bool:
        """Return whether the project has a module of this name, which its path may not lead to."""
        places = [os.path.join(place, part) for place in (self._root, os.getcwd()) for part in ("", "src")]
        return any(os.path.exists(os.path.join(place, file)) for place in places for file in (name, f"{name}.py"))

    def frames(self, frame: Optional[FrameType]) -> tuple[FrameTuple, ...]:
        """Return the user's lines from ``frame`` outwards, innermost first."""
        found: list[FrameTuple] = []
        known = self._known
        while frame is not None:
            filename = frame.f_code.co_filename
            path = known.get(filename)
            if path is None:
                path = self._path_of(filename)
            if path:
                found.append((path, frame.f_lineno or 0, name_of(frame)))
                if len(found) == _MOST_FRAMES:
                    break
            frame = frame.f_back
        return tuple(found)

    def raised_frames(self, trace: Optional[TracebackType]) -> list[FrameTuple]:
        """Return the user's lines of a traceback, innermost first."""
        raised = ((frame.f_code.co_filename, line, name_of(frame)) for frame, line in walk_tb(trace))
        return [(os.path.abspath(file), line, name) for file, line, name in raised if self.holds(file)][::-1]

    def instructions(self, frame: Optional[FrameType]) -> tuple[int, ...]:
        """Return the user's part of a stack as ``id`` of the code and instruction of each frame."""
        found: list[int] = []
        known = self._known
        while frame is not None:
            code = frame.f_code
            path = known.get(code.co_filename)
            if path is None:
                path = self._path_of(code.co_filename)
            if path:
                found.append(id(code))
                found.append(frame.f_lasti)
                if len(found) == 2 * _MOST_FRAMES:
                    break
            frame = frame.f_back
        return tuple(found)

    def code(self, frame: Optional[FrameType]) -> tuple[CodeType, ...]:
        """Return the code of the user's part of a stack."""
        return tuple(one.f_code for one in islice(self.own(frame), _MOST_FRAMES))

    def own(self, frame: Optional[FrameType]) -> Iterator[FrameType]:
        """Yield the user's frames from ``frame`` outwards."""
        return (one for one in outwards(frame) if self.holds(one.f_code.co_filename))

    def frames_here(self, frame: Optional[FrameType]) -> tuple[FrameTuple, ...]:
        """Return the user's lines of this thread or, where it has none, those that started it, or (as of an autograd
        thread) those of the main thread.
        """
        found = self.frames(frame)
        here = threading.current_thread()
        if not found and here is not threading.main_thread():
            if here in self._starts:
                return self._starts[here]
            main = sys._current_frames().get(threading.main_thread().ident or 0)
            found = self.frames(main)
        return found

    def thread_starts(self, frame: FrameType, arguments: tuple[Any, ...], _: Any) -> None:
        """Note who starts a thread, before ``Thread.start``."""
        self._starts[arguments[0]] = self.frames(frame)

    def _path_of(self, filename: str) -> str:
        """Return the absolute path of a file of the user's, an empty string for others; looked up once a file."""
        path = self._known.get(filename)
        if path is None:
            path = self._known[filename] = os.path.abspath(filename) if self._look(filename) else ""
        return path

    def _look(self, filename: str) -> bool:
        if not filename or filename.startswith("<"):
            return False
        path = os.path.realpath(filename)
        if path.startswith(self._ours):
            return False
        if self._root and path.startswith(self._root):
            return not any(part in path[len(self._root) - 1 :] for part in _INSTALLED)
        if any(part in path for part in _INSTALLED):
            return False
        return not path.startswith(self._libraries)


def name_of(frame: FrameType) -> str:
    """Return the qualified name of a frame's function, where this Python has it."""
    return str(getattr(frame.f_code, "co_qualname", frame.f_code.co_name))


def all_frames(frame: Optional[FrameType]) -> list[FrameTuple]:
    """Return every line of a stack, innermost first."""
    return [(one.f_code.co_filename, one.f_lineno or 0, name_of(one)) for one in islice(outwards(frame), 64)]


def outwards(frame: Optional[FrameType]) -> Iterator[FrameType]:
    """Yield a frame and, one after the other, those that led to it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def tree_around(frame: FrameType) -> Optional[ast.Module]:
    """Return the file that a frame runs; None where it cannot be parsed."""
    return _parsed("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))


# Collectives of a few files come in turn, which need not be parsed anew for each of their lines.
@functools.lru_cache(maxsize=8)
def _parsed(text: str) -> Optional[ast.Module]:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


GENERATOR = 0x20 | 0x200
"""Flags of the code of a generator and of an asynchronous one."""
_FOR_ITER = opcode.opmap["FOR_ITER"]
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PASSED_OVER = frozenset({os.__file__, "<frozen os>", "<frozen _collections_abc>", os.path.__file__})


def calling_frame() -> Optional[FrameType]:
    """Return the frame that called, through our own frames and those of ``os``; it may be a library's."""
    files = ((one, one.f_code.co_filename) for one in outwards(sys._getframe(1)))
    return next((one for one, file in files if not file.startswith(OURS) and file not in _PASSED_OVER), None)


def beyond(frame: Optional[FrameType], files: Container[str]) -> Optional[FrameType]:
    """Return the first frame from ``frame`` outwards whose code is in none of these files."""
    return next((one for one in outwards(frame) if one.f_code.co_filename not in files), None)


def loops(frame: FrameType) -> bool:
    """Return whether a frame draws the next element for a ``for`` statement."""
    return frame.f_code.co_code[frame.f_lasti] == _FOR_ITER


def leave_no_frame(error: BaseException) -> None:
    """Take the frame of the caller, which is about to raise ``error`` on, out of its traceback.

    A bare ``raise`` adds it no more from Python 3.11 on; before that Python itself puts it back.
    """
    own = error.__traceback__
    if own is not None and own.tb_frame is sys._getframe(1):
        error.__traceback__ = own.tb_next
