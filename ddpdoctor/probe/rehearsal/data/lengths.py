"""What a ``len(loader)`` in a script is for: how long training is, or where the loop over this pass ends.

Schedules, intervals and averages are made of the true length and break on another. A loop that ends by the length has
to get the one that it will meet. The source of the calling line decides; a length is followed through names, tensors,
what a function returns, and a reduction in which the ranks agree on the shortest.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Literal, NamedTuple, Optional

from ...torch_compat import replaces
from ...user_code import tree_around
from ..loop_subjects import covers
from ..schedule import Trail

# Smaller batches, made where their samples are fetched: lengths, samplers and their index lists stay as they are.


def cut_batches(torch: Any, samples: int) -> None:
    """Make every loader that collates fetch at most so many samples for a batch, in workers too."""
    fetchers = torch.utils.data._utils.fetch

    def fetch_less(fetch: Any, fetcher: Any, index: Any) -> Any:
        if fetcher.auto_collation and isinstance(index, (list, tuple)) and len(index) > samples:
            index = index[:samples]
        return fetch(fetcher, index)

    for fetcher_class in (fetchers._MapDatasetFetcher, fetchers._IterableDatasetFetcher):
        replaces("fetch", fetcher_class)(fetch_less)


# How many samples the last batch of a pass holds, by the attributes of its loader.


def short_batch_samples(iterator: Any, ranks_of_job: int) -> Optional[int]:
    """Return the samples of the short batch that ends a whole pass; 0 when all are full, None when not known.

    ``ranks_of_job`` is how many ranks divide the data when the job is not rehearsed; 0 when that is not known.
    """
    batches = getattr(iterator, "_index_sampler", None)
    if not getattr(iterator, "_auto_collation", False):
        # The data set hands out what it likes, batches or single samples.
        return 0
    if getattr(iterator, "_drop_last", True) or getattr(batches, "drop_last", False):
        return 0
    if getattr(batches, "even_batches", False):
        # Accelerate fills the last batch up with the first samples.
        return 0
    if getattr(iterator, "_dataset_kind", 1) != 0:
        return None
    size, samples = getattr(batches, "batch_size", None), _samples(getattr(batches, "sampler", None), ranks_of_job)
    return samples % size if isinstance(size, int) and size > 0 and samples is not None else None


def _samples(sampler: Any, ranks_of_job: int) -> Optional[int]:
    """Return the samples that a pass of one rank draws; None when the sampler has no length."""
    from torch.utils.data import DistributedSampler

    try:
        samples = len(sampler)
        if ranks_of_job and type(sampler).__len__ is DistributedSampler.__len__:
            whole = len(sampler.dataset)
            samples = whole // ranks_of_job if sampler.drop_last else -(-whole // ranks_of_job)
    except (TypeError, AttributeError, NotImplementedError):
        return None
    return int(samples)


# An iterator over a loader that ends after a few batches.


class CutShort(StopIteration):
    """The end of a pass that we cut: a loop ends by it, a bare ``next`` lets it through to be recognised."""


class ShortPass:
    """An iterator that ends when its owner, ``Loaders``, decides so; everything else is that of the real one."""

    def __init__(self, owner: Any, trail: Trail, inner: Iterator[Any]) -> None:
        self._owner = owner
        self._inner = inner
        self._trail = trail

    def __iter__(self) -> ShortPass:
        return self

    def __next__(self) -> Any:
        owner, trail = self._owner, self._trail
        if owner.is_over(trail):
            frame = sys._getframe(1)
            end = "counted" if owner.is_counted(trail, frame) else "cut"
            if end == "cut" or not owner.may_go_on(trail):
                owner.finish(trail, self._inner, end)
                owner.was_cut(trail, frame, end)
                raise CutShort
        try:
            batch = next(self._inner)
        except StopIteration:
            owner.finish(trail, self._inner, "exhausted")
            raise
        owner.drawn(trail)
        if trail.looped:
            trail.looped = owner.is_looped(sys._getframe(1))
        return owner.hand_out(trail, batch, self._inner)

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # a copy that is not yet filled
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __del__(self) -> None:
        try:
            self._owner.finish(self._trail, self._inner, "abandoned")
        except Exception:
            return


def is_cut(error: BaseException) -> bool:
    """Return whether an exception is the end of a pass that we cut, or was made of it."""
    seen: set[int] = set()
    step: Optional[BaseException] = error
    while step is not None and id(step) not in seen:
        if isinstance(step, CutShort):
            return True
        seen.add(id(step))
        step = step.__cause__
    return False


COUNTING_FRAMEWORKS = ("ignite", "lightning", "pytorch_lightning", "transformers")
"""Their trainers read the length to find a pass's last batch."""
_MOST_CALLERS = 4
_MOST_NAMES = 4
"""Assignments and returns through which a length is followed."""
_PASS_ON = frozenset({"tensor", "as_tensor", "Tensor", "LongTensor", "IntTensor", "FloatTensor", "int", "min"})
_PASS_ON_THEMSELVES = frozenset({"item", "to", "cuda", "cpu", "int", "long", "clone"})
_AGREE = frozenset({"all_reduce", "broadcast"})

Purpose = Literal["", "end", "turns"]
"""What a length is for: ``end``, where a loop ends; ``turns``, how often a loop draws by itself, which this rank
decides alone; empty for anything else."""


class Source(NamedTuple):
    """What is read of a file."""

    parents: dict[ast.AST, ast.AST]
    """The parent of every node."""
    counters: frozenset[str]
    """Names and attributes that loops count with."""
    alone: bool = False
    """It is the script itself, whose functions no other file calls."""


class Lengths:
    """The lines that read a length, each parsed once."""

    def __init__(self) -> None:
        self._sources: dict[str, Optional[Source]] = {}
        self._answers: dict[tuple[object, int], Purpose] = {}

    def purpose(self, frame: Optional[FrameType]) -> Purpose:
        """Return what the code at ``frame`` uses a length for."""
        for _ in range(_MOST_CALLERS):
            if frame is None:
                return ""
            if str(frame.f_globals.get("__name__", "")).partition(".")[0] in COUNTING_FRAMEWORKS:
                return "end"
            if frame.f_code.co_name != "__len__":
                break
            # A wrapper passes on its own call.
            frame = frame.f_back
        if frame is None:
            return ""
        key = (frame.f_code, frame.f_lasti)
        known = self._answers.get(key)
        if known is None:
            known = self._answers[key] = self._look(frame)
        return known

    def _look(self, frame: FrameType) -> Purpose:
        name = frame.f_code.co_filename
        if name not in self._sources:
            tree, alone = tree_around(frame), frame.f_globals.get("__name__") in ("__main__", "__mp_main__")
            self._sources[name] = None if tree is None else read(tree, alone=alone)
        source = self._sources[name]
        if source is None:
            return ""
        line, column = _position(frame)
        calls = [node for node in source.parents if _is_length(node) and covers(node, line)]
        calls = [call for call in calls if _starts(call) == (line, column)] or calls
        purposes = {purpose_of(call, source) for call in calls}
        if not purposes or "" in purposes:
            return ""
        return "turns" if purposes == {"turns"} else "end"


def read(tree: ast.AST, *, alone: bool = False) -> Source:
    """Take down what the judgement needs of a parsed file."""
    parents, counters = {}, set()
    for node in ast.walk(tree):
        parents.update(dict.fromkeys(ast.iter_child_nodes(node), node))
        if isinstance(node, (ast.For, ast.AsyncFor, ast.AugAssign)):
            targets = ast.walk(node.target)
            counters |= {getattr(target, "id", getattr(target, "attr", "")) for target in targets}
    return Source(parents, frozenset(counters - {""}), alone)


def purpose_of(node: ast.AST, source: Source) -> Purpose:
    """Return what an expression, a length, is used for; empty where there is a use that a shorter one could break."""
    uses = set(_uses(node, source, _MOST_NAMES))
    if "other" in uses or not uses & {"end", "turns"}:
        return ""
    return "end" if uses & {"end", "agreed"} else "turns"


def _uses(node: ast.AST, source: Source, names_left: int) -> Iterator[str]:
    """Yield what a length is used for: ``end``, ``turns``, ``agreed``, ``harmless`` or ``other``."""
    parent = source.parents.get(node)
    if isinstance(parent, ast.BinOp):
        yield from _uses_in_arithmetic(node, parent, source, names_left)
    elif isinstance(parent, ast.Compare):
        sides = [side for side in (parent.left, *parent.comparators) if side is not node]
        yield "end" if all(_counts(side, source) for side in sides) else "other"
    elif isinstance(parent, ast.Call) and node in parent.args:
        yield _use_in_call(parent, source)
        if _name(parent) in _PASS_ON:
            yield from _uses(parent, source, names_left)
    elif (same := _held_by(node, parent, source)) is not None:
        yield from _uses(same, source, names_left)
    elif isinstance(parent, ast.Return) and names_left and source.alone:
        yield from _uses_of_result(parent, source, names_left - 1)
    elif isinstance(parent, ast.keyword):
        yield "harmless" if parent.arg in ("total", "desc", "length") else "other"
    elif isinstance(parent, ast.FormattedValue):
        yield "harmless"
    elif isinstance(parent, ast.Assign) and names_left and all(isinstance(name, ast.Name) for name in parent.targets):
        for target in parent.targets:
            yield from _uses_of_name(getattr(target, "id", ""), parent, source, names_left - 1)
    else:
        yield "other"


def _held_by(node: ast.AST, parent: Optional[ast.AST], source: Source) -> Optional[ast.AST]:
    """Return the expression around a length, or a tensor of it, that is still that length; None when there is none."""
    if isinstance(parent, ast.List) and _name(source.parents.get(parent)) in _PASS_ON:
        return source.parents[parent]
    if isinstance(parent, ast.Attribute) and parent.attr in _PASS_ON_THEMSELVES:
        return source.parents[parent]
    return parent if isinstance(parent, ast.Subscript) and node is parent.value else None


def _uses_in_arithmetic(node: ast.AST, parent: ast.BinOp, source: Source, names_left: int) -> Iterator[str]:
    if isinstance(parent.op, (ast.Add, ast.Sub)) and node is parent.left and isinstance(parent.right, ast.Constant):
        yield from _uses(parent, source, names_left)
    elif isinstance(parent.op, ast.Mod) and node is parent.right and _counts(parent.left, source):
        yield "end"
    else:
        yield "harmless" if isinstance(parent.op, (ast.Div, ast.Mod)) and node is parent.right else "other"


def _use_in_call(call: ast.Call, source: Source) -> str:
    name = _name(call)
    if name in ("print", "info", "debug", "format"):
        return "harmless"
    if name in _PASS_ON:
        # What it is compared with is the same on every rank, or unknown.
        return "agreed" if name == "min" else "harmless"
    if name in _AGREE:
        shortest = any("MIN" in (getattr(part, "id", ""), getattr(part, "attr", "")) for part in ast.walk(call))
        return "agreed" if shortest or name == "broadcast" else "other"
    if name != "range":
        return "other"
    loop: Optional[ast.AST] = call
    while isinstance(loop, ast.expr):
        loop = source.parents.get(loop)
    # A loop that draws by itself: `for i in range(len(loader)): batch = next(batches)`.
    inner = [node for item in getattr(loop, "body", ()) for node in ast.walk(item)]
    if not isinstance(loop, ast.For) or not any(map(_draws, inner)):
        return "other"
    return "end" if any(isinstance(node, (ast.Break, ast.Return)) for node in inner) else "turns"


def _uses_of_result(statement: ast.Return, source: Source, names_left: int) -> Iterator[str]:
    """Yield the uses of a length that a function returns, where it is called in this file, else ``other``."""
    function = getattr(_scope(statement, source), "name", "")
    calls = [node for node in source.parents if isinstance(node, ast.Call) and _name(node) == function]
    for call in calls:
        yield from _uses(call, source, names_left)
    if not calls:
        yield "other"


def _uses_of_name(name: str, assignment: ast.AST, source: Source, names_left: int) -> Iterator[str]:
    for node in ast.walk(_scope(assignment, source)):
        if isinstance(node, ast.AugAssign) and getattr(node.target, "id", "") == name:
            yield "other"
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            yield from _uses(node, source, names_left)


def _scope(node: ast.AST, source: Source) -> ast.AST:
    while node in source.parents and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        node = source.parents[node]
    return node


def _counts(side: ast.AST, source: Source) -> bool:
    """Return whether an expression is a loop's counter, perhaps with arithmetic around it, and no call."""
    nodes = list(ast.walk(side))
    names = {getattr(node, "id", getattr(node, "attr", "")) for node in nodes}
    return bool(names & source.counters) and not any(isinstance(node, ast.Call) for node in nodes)


def _draws(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return "next" in _name(node)


def _name(node: Optional[ast.AST]) -> str:
    """Return the last name of what is called; empty for anything but a call."""
    function = getattr(node, "func", None)
    return str(getattr(function, "id", getattr(function, "attr", "")))


def _is_length(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return getattr(node.func, "id", "") == "len" or getattr(node.func, "attr", "") == "__len__"


def _starts(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", -1)


def _position(frame: FrameType) -> tuple[int, int]:
    """Return line and column of what the frame executes; the column is -1 where this Python has none."""
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is not None:
        for index, (line, _, column, _) in enumerate(positions()):
            if index == frame.f_lasti // 2:
                return line or frame.f_lineno, -1 if column is None else column
    return frame.f_lineno, -1
