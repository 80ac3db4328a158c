"""Notices a thread that goes around one loop of the user's while nothing changes, so that it never leaves it.

The loop is seen in looks at the stack: the outermost of the user's frames that moves while those around it stand. A
loop that is only slow makes progress somewhere: in a variable of its own, of a function that it calls, or of an object
that they hold. One that has seen each of its states before will see them again. What waits for a clock, for the outside
or for another thread or process may leave without a change of its own, and is left alone.

In rehearsals only: before Python 3.13 to look at a frame's variables changes what the user's ``locals()`` returned, and
keeps what the variables held.
"""

from __future__ import annotations

import ast
import functools
import opcode
import operator
import sys
import threading
import time
from collections import deque
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, NamedTuple, Optional, Union

from .journal import Journal
from .user_code import UserCode, tree_around

SHORTEST_NS = 12_000_000_000
PAUSES = 20
"""A loop has to last for so many of the longest pauses of its process, and for this time."""
FEWEST_ROUNDS = 20
"""It was seen to go back so often: one call that takes long goes around nowhere."""
MOST_STATES = 4_000
LOOKED_INTO_AFTER_NS = 1_000_000_000
STANDS_AFTER_NS = 3_000_000_000
"""A frame that has not moved for so long has only come to where it is: the loop is in what it calls."""
WORKER_LOOKED_AT_EVERY_S = 0.1
_DEPTH = 4
_MOST_PARTS = 400
_ENDS_SHOWN = 4
"""Elements at either end of a longer container that count for its state."""
_DIGESTED_BYTES = 1 << 16
_CONSTANT = (type(None), bool, int, float, complex, str, bytes, range, type(...))
_CONSTANT_KINDS = frozenset({"Generator", "Random", "RandomState", "device", "dtype", "object"})
"""Types of the rest that count as constant: another draw is no progress."""
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, CodeType)
_CONTAINERS = (list, tuple, set, frozenset, dict, deque)
_ITERATED: tuple[Any, ...] = ([], (), {}, {}.values(), {}.items(), set(), range(0), "", b"")
_ITERATORS = tuple(type(iter(one)) for one in _ITERATED)
_FROM_OUTSIDE = frozenset(
    {"time", "datetime", "os", "posix", "posixpath", "glob", "pathlib", "socket", "select", "_io", "io"}
)
"""Modules whose functions may answer otherwise although nothing here has changed."""


class _Loop(NamedTuple):
    around: tuple[tuple[int, int, int], ...]
    """The user's frames around it, which stand: number of the frame, of its code, and instruction."""
    frame: int
    code: int


class EndlessLoops:
    """What one thread has been seen to do since it came into the loop that it is in now."""

    def __init__(self, journal: Journal, thread: int) -> None:
        """Watch the thread with this number in Python."""
        self._journal = journal
        self._thread = thread
        self._last: tuple[tuple[int, int, int], ...] = ()
        self._loop: Optional[_Loop] = None
        self._since_ns = self._changed_ns = self._moved_ns = 0
        self._rounds = self._instruction = 0
        self._lines: set[int] = set()
        self._states: set[int] = set()
        self._named: set[str] = set()
        """What the code of the loop, and of what it calls, names beside variables."""
        self._empty: set[str] = set()
        self._filled: set[str] = set()
        """Containers that held nothing at some look, and those that held something."""
        self._told = self._asks_outside = False
        self._progress: tuple[int, ...] = ()
        self._progress_ns = self._longest_ns = 0

    def look(self, frame: Optional[FrameType], now_ns: int) -> None:
        """Take in a look at the innermost frame of the thread; write once that it is in such a loop, and if it left."""
        self._time_pauses(now_ns)
        frames = list(self._journal.user_code.own(frame))[::-1]
        chain = tuple((id(one), id(one.f_code), one.f_lasti) for one in frames)
        last, self._last = self._last, chain
        shorter = min(len(chain), len(last))
        same = next((at for at in range(shorter) if chain[at] != last[at]), shorter)
        loop = self._loop
        depth = 0 if loop is None else len(loop.around)
        if loop is not None and depth <= same and chain[depth : depth + 1]:
            if chain[depth] != last[depth] or _turns_back(frames[depth]):
                self._moved_ns = now_ns
            if chain[depth][:2] == (loop.frame, loop.code) and now_ns - self._moved_ns < STANDS_AFTER_NS:
                self._go_on(frames[depth:], frames[depth - 1] if depth else None, now_ns)
                return
        if self._told:
            self._journal.event("endless_loop", over=True)
        self._loop, self._told, self._asks_outside = None, False, False
        # Python changes from one thread to another where a loop turns back: a short one is met nowhere else.
        if same == len(chain) == len(last) and frames and frames[-1] is frame and _turns_back(frame):
            same -= 1
        if same < shorter and chain[same][:2] == last[same][:2]:
            self._loop = _Loop(chain[:same], *chain[same][:2])
            self._since_ns = self._changed_ns = self._moved_ns = now_ns
            self._rounds, self._instruction = 0, chain[same][2]
            self._lines, self._states = set(), set()
            self._named, self._empty, self._filled = set(), set(), set()

    def _time_pauses(self, now_ns: int) -> None:
        journal = self._journal
        progress = (journal.forwards, journal.backwards, journal.optimizer_steps)
        if progress != self._progress:
            if any(self._progress):
                self._longest_ns = max(self._longest_ns, now_ns - self._progress_ns)
            self._progress, self._progress_ns = progress, now_ns

    def _go_on(self, frames: list[FrameType], caller: Optional[FrameType], now_ns: int) -> None:
        """Take in a look at a loop, at what it calls, and at what has called its function."""
        loop = frames[0]
        self._rounds += loop.f_lasti < self._instruction or _turns_back(loop)
        self._instruction = loop.f_lasti
        self._lines.add(loop.f_lineno or 0)
        lasted_ns = now_ns - self._since_ns
        if self._progress_ns > self._since_ns:  # Training goes on inside of it.
            self._since_ns = self._changed_ns = now_ns
            self._states.clear()
            return
        if lasted_ns < LOOKED_INTO_AFTER_NS or len(self._states) > MOST_STATES or self._told:
            return
        self._named.update(name for one in frames for name in one.f_code.co_names)
        self._asks_outside |= any(map(_looks_outside, frames))
        try:
            state = _State(frames, caller, self._named, self._journal.user_code)
        except RuntimeError:  # The thread changes what is read.
            return
        self._empty |= state.empty
        self._filled |= state.filled
        if state.digest not in self._states:
            self._states.add(state.digest)
            self._changed_ns = now_ns
        if lasted_ns < max(SHORTEST_NS, PAUSES * self._longest_ns) or self._rounds < FEWEST_ROUNDS:
            return
        recurs = not state.is_opaque and 2 * (now_ns - self._changed_ns) >= lasted_ns
        empty = self._empty - self._filled
        node = _statement(loop, self._lines)
        if (recurs or _leaves_only_by(node, empty)) and not (self._asks_outside or self._others_work()):
            self._told = True
            innermost, *outer = self._journal.user_code.frames(loop)
            line = min(self._lines) if node is None else node.lineno
            site = self._journal.site_of(((innermost[0], line, innermost[2]), *outer))
            self._journal.event(
                "endless_loop", site=site, rounds=self._rounds, lasted_ns=lasted_ns, empty=sorted(empty)
            )

    def _others_work(self) -> bool:
        """Return whether another thread of the user's, or a child, may change what the loop sees."""
        processes = sys.modules.get("multiprocessing.process")
        if getattr(processes, "_children", None):
            return True
        stacks = sys._current_frames()
        others = (one for one in threading.enumerate() if one.ident != self._thread)
        return any(self._works_for_users(one, stacks.get(one.ident or 0)) for one in others)

    def _works_for_users(self, thread: threading.Thread, frame: Optional[FrameType]) -> bool:
        if any(self._journal.user_code.own(frame)):
            return True
        calls = getattr(thread, "function", None) or getattr(thread, "_target", None) or type(thread).run
        code = getattr(getattr(calls, "__func__", calls), "__code__", None)
        is_of_a_pool = str(getattr(calls, "__module__", "")).startswith("concurrent")
        return is_of_a_pool or (code is not None and self._journal.user_code.holds(code.co_filename))


def _turns_back(frame: FrameType) -> bool:
    """Return whether a frame is about to begin a loop anew."""
    name = opcode.opname[frame.f_code.co_code[frame.f_lasti]]
    return "BACKWARD" in name or name == "JUMP_ABSOLUTE"


def watch_workers(journal: Journal, torch: Any) -> None:
    """Watch each worker of a loader, too."""
    module = torch.utils.data._utils.worker
    work = module._worker_loop

    @functools.wraps(work)
    def _worker_loop(*arguments: Any, **options: Any) -> Any:
        loops = EndlessLoops(journal, threading.get_ident())
        threading.Thread(target=_watch, args=(journal, loops, threading.get_ident()), daemon=True).start()
        return work(*arguments, **options)

    module._worker_loop = _worker_loop


def _watch(journal: Journal, loops: EndlessLoops, thread: int) -> None:
    while True:
        time.sleep(WORKER_LOOKED_AT_EVERY_S)
        journal.guarded(loops.look, sys._current_frames().get(thread), time.monotonic_ns(), harms=())


# What the source says of a loop.


def _statement(loop: FrameType, lines: set[int]) -> Optional[Union[ast.While, ast.For]]:
    """Return the innermost statement that loops over all lines at which a frame was seen."""
    tree = tree_around(loop)
    around = [
        node
        for node in (ast.walk(tree) if tree is not None else ())
        if isinstance(node, (ast.While, ast.For)) and node.lineno <= min(lines) and max(lines) <= (node.end_lineno or 0)
    ]
    return max(around, key=lambda node: node.lineno, default=None)


def _leaves_only_by(node: Optional[Union[ast.While, ast.For]], empty: set[str]) -> bool:
    """Return whether each way out of a loop without an end is in a loop over something that holds nothing."""
    if isinstance(node, ast.While):
        has_no_end = isinstance(node.test, ast.Constant) and bool(node.test.value)
    else:
        has_no_end = node is not None and ast.unparse(node.iter) in ("count()", "itertools.count()")
    return node is not None and has_no_end and not any(_exits(one, empty) for one in node.body)


def _exits(node: ast.AST, empty: set[str]) -> bool:
    if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Return, ast.Break, ast.Raise)):
        return True
    is_passed_over = isinstance(node, ast.For) and ast.unparse(node.iter) in empty
    kept = node.orelse if is_passed_over and isinstance(node, ast.For) else ast.iter_child_nodes(node)
    return not isinstance(node, (ast.FunctionDef, ast.Lambda)) and any(_exits(one, empty) for one in kept)


def _looks_outside(frame: FrameType) -> bool:
    """Return whether the code of a frame names a module, or a function of one, that asks for a clock or the outside."""
    for name in frame.f_code.co_names:
        found = frame.f_globals.get(name, frame.f_builtins.get(name))
        module = found.__name__ if isinstance(found, ModuleType) else getattr(found, "__module__", None)
        if isinstance(module, str) and module.partition(".")[0] in _FROM_OUTSIDE:
            return True
    return False


class _State:
    """What the variables of some frames, and the objects that they hold, are worth at one moment."""

    def __init__(
        self, frames: list[FrameType], caller: Optional[FrameType], named: set[str], user_code: UserCode
    ) -> None:
        self.empty: set[str] = set()
        """Containers that hold nothing, as the code names them."""
        self.filled: set[str] = set()
        self.is_opaque = False
        """Something that the code uses may change unseen."""
        self._parts = 0
        self._named, self._user_code = named, user_code
        found: list[object] = []
        for frame in frames:
            values = dict(frame.f_locals)
            for name, value in values.items():
                self._note(name, value)
            for name, value in _attributes(values.get("self")):
                if name in named:
                    self._note(f"self.{name}", value)
            found.append((id(frame.f_code), self._all_of(values, used=True)))
        if caller is not None:
            found.append(self._all_of(dict(caller.f_locals), used=False))
        self.digest = hash(tuple(found))

    def _all_of(self, values: dict[str, Any], *, used: bool) -> object:
        return tuple((name, self._of(value, 0, used=used)) for name, value in values.items())

    def _note(self, name: str, value: object) -> None:
        if isinstance(value, _CONTAINERS) and not name.startswith("."):
            (self.filled if value else self.empty).add(name)

    def _of(self, value: Any, depth: int, *, used: bool) -> object:
        """Return what can be hashed and differs wherever the value does; ``used``: the code may ask it for more."""
        self._parts += 1
        if isinstance(value, _CONSTANT):
            return value
        if isinstance(value, _CODE):
            return id(value)
        if self._parts > _MOST_PARTS or depth > _DEPTH:
            return type(value)
        if isinstance(value, _CONTAINERS):
            kept = list(value.items() if isinstance(value, dict) else value)
            if len(kept) > 2 * _ENDS_SHOWN:
                kept = [*kept[:_ENDS_SHOWN], *kept[-_ENDS_SHOWN:]]
            return type(value), len(value), tuple(self._of(one, depth + 1, used=used) for one in kept)
        if isinstance(value, GeneratorType):
            frame = value.gi_frame
            if frame is None or value.gi_running:
                return id(value) if value.gi_running else "over"
            held = dict(frame.f_locals).items()
            return frame.f_lasti, tuple((name, self._of(one, depth + 1, used=used)) for name, one in held)
        if isinstance(value, _ITERATORS):
            return type(value), operator.length_hint(value)
        content = _content(value)
        if content is not None:
            return content
        attributes = _attributes(value)
        if not attributes:
            self.is_opaque |= used and type(value).__name__ not in _CONSTANT_KINDS
            return id(value)
        module = sys.modules.get(type(value).__module__)
        is_users = self._user_code.holds(str(getattr(module, "__file__", None) or ""))
        return type(value), tuple(
            (name, self._of(held, depth + 1, used=used and (name in self._named or not is_users)))
            for name, held in attributes
        )


def _attributes(value: object) -> list[tuple[str, object]]:
    held = getattr(value, "__dict__", None)
    return list(held.items()) if isinstance(held, dict) else []


def _is_one(value: object, module: str, name: str) -> bool:
    return isinstance(value, getattr(sys.modules.get(module), name, ()))


def _may_go(tensor: Any, size_bytes: int) -> bool:
    """Return whether the memory of a tensor is part of a larger one, or gone: FSDP lets go of that between forwards.

    What is read then ends the process, and this is read beside the thread that trains. To read one of another class, a
    DTensor, may run a collective.
    """
    plain = type(tensor) is sys.modules["torch"].Tensor and not tensor.requires_grad
    return not plain or bool(tensor.untyped_storage().nbytes() != size_bytes)


def _content(value: Any) -> object:
    """Return what a small tensor or array holds, and of others which it is; None for anything else."""
    if _is_one(value, "torch", "Tensor"):
        size_bytes = value.numel() * value.element_size()
        if str(value.device) != "cpu" or value.is_sparse or size_bytes > _DIGESTED_BYTES or _may_go(value, size_bytes):
            return id(value), int(value._version)
        return tuple(value.shape), hash(tuple(value.detach().reshape(-1).tolist()))
    if _is_one(value, "numpy", "ndarray"):
        return value.shape, hash(value.tobytes()) if value.nbytes <= _DIGESTED_BYTES else id(value)
    return None
