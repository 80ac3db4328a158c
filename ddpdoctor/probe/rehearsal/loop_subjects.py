"""What one turn of a loop over tensors is about, so that ranks in another order are detected.

Two tensors of one shape that are reduced by one line leave the same trace in any order. The loop separates them: by the
text that it counts with, or by the name under which the script holds the tensor, which is the same on every rank.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple, Optional

from ..journal import Journal
from ..observed import tensor_digest
from ..user_code import tree_around

# What stands at a line of the user's code, for the collectives that a rehearsal looks at more closely.


def covering(tree: ast.AST, line: int) -> list[ast.AST]:
    """Return the statements and expressions that a line is part of."""
    return [node for node in ast.walk(tree) if covers(node, line)]


def covers(node: ast.AST, line: int) -> bool:
    """Return whether a line is part of a statement or an expression."""
    first = getattr(node, "lineno", None)
    return first is not None and first <= line <= (getattr(node, "end_lineno", None) or first)


KINDS = frozenset({"all_reduce", "reduce", "broadcast"})
MOST_NAMED = 600
"""Turns of a process that are named."""
MOST_HELD = 2_000
"""Variables, or entries of a dictionary, among which a tensor is looked for."""
FRAMES_SEARCHED = 3
"""The user's functions, from the collective outwards, in which the loop is looked for."""
DIGESTED_BYTES = 256

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


class Around(NamedTuple):
    """The loop whose turns a call is made in."""

    depth: int
    """Functions of the user between the collective and the loop."""
    targets: tuple[str, ...]
    """The variables that the loop sets."""


_UNKNOWN = Around(0, ())


class Subjects:
    """Whether each call chain is a turn of such a loop."""

    def __init__(self, journal: Journal, torch: Any, name_of: Callable[[Any], str]) -> None:
        self._journal = journal
        self._torch = torch
        self._name_of = name_of
        """Names a parameter or a buffer of a wrapped module; empty for other tensors."""
        self._loops: dict[int, Optional[Around]] = {}
        self._named = 0

    def subject_of(self, site: int, frame: FrameType) -> str:
        """Return what the collective that starts at ``frame`` is about; empty where no loop shows it."""
        if site not in self._loops:
            self._loops[site] = None
            self._loops[site] = self._find(frame)
        around = self._loops[site]
        if around is None or self._named >= MOST_NAMED:
            return ""
        self._named += 1
        own = next(islice(self._frames(frame), around.depth, None), None)
        held: Mapping[str, Any] = {} if own is None else own.f_locals
        values = [held[name] for name in around.targets if name in held]
        texts = [repr(value)[:100] for value in values if isinstance(value, str)]
        tensors = [value for value in values if isinstance(value, self._torch.Tensor)]
        if texts or not tensors:
            return ", ".join(texts)
        return self._name_of(tensors[0]) or _called(tensors[0], held, around.targets) or self._content(tensors[0])

    def has_none(self, site: int) -> bool:
        """Return whether collectives from this call chain are known to be no turns of a loop."""
        return self._loops.get(site, _UNKNOWN) is None

    def _find(self, frame: FrameType) -> Optional[Around]:
        for depth, own in enumerate(self._frames(frame)):
            tree = tree_around(own)
            targets = () if tree is None else loop_targets(tree, own.f_lineno)
            if targets:
                return Around(depth, targets)
        return None

    def _frames(self, frame: Optional[FrameType]) -> Iterator[FrameType]:
        return islice(self._journal.user_code.own(frame), FRAMES_SEARCHED)

    def _content(self, tensor: Any) -> str:
        """Return a name for a parameter of no wrapped module: replicas hold the same numbers."""
        if not isinstance(tensor, self._torch.nn.Parameter):
            return ""
        digest = tensor_digest(tensor, DIGESTED_BYTES)
        return f"#{digest}" if digest else ""


def loop_targets(tree: ast.AST, line: int) -> tuple[str, ...]:
    """Return the variables of the innermost loop around a line that its calls are given, directly or by assignment."""
    nodes = covering(tree, line)
    given = {
        part.id
        for node in nodes
        if isinstance(node, ast.Call)
        for argument in node.args
        for part in ast.walk(argument)
        if isinstance(part, ast.Name)
    }
    for loop in sorted(filter(_is_loop, nodes), key=lambda node: -getattr(node, "lineno", 0)):
        targets = _targets(loop)
        made = {
            name
            for node in ast.walk(loop)
            if isinstance(node, ast.Assign) and _names(node.value) & set(targets)
            for target in node.targets
            for name in _names(target)
        }
        if given & (set(targets) | made):
            return targets
    return ()


def _is_loop(node: ast.AST) -> bool:
    return isinstance(node, (ast.For, *_COMPREHENSIONS))


def _targets(loop: Any) -> tuple[str, ...]:
    parts = [loop.target] if isinstance(loop, ast.For) else [part.target for part in loop.generators]
    return tuple(sorted(name for part in parts for name in _names(part)))


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _called(tensor: Any, held: Mapping[str, Any], targets: tuple[str, ...]) -> str:
    """Return the names under which a function's variables, their attributes and dictionaries hold a tensor."""
    names = set()
    for name, value in list(held.items())[:MOST_HELD]:
        if value is tensor and name not in targets:
            names.add(name)
        inside = value if isinstance(value, dict) else getattr(value, "__dict__", None) if name == "self" else None
        if isinstance(inside, dict):
            parts = list(inside.items())[:MOST_HELD]
            names |= {f"{name}[{key!r}]" for key, part in parts if part is tensor and isinstance(key, (str, int))}
    return ", ".join(sorted(names))
