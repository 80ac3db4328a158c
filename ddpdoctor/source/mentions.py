"""What functions may lead to, by the names used in them and in the functions that they call."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

import msgspec

from ddpdoctor.source.module import Module, children_of
from ddpdoctor.source.noted_names import NOTED_CALLS, TELLING_WORDS, worth_walking
from ddpdoctor.source.noted_training_names import TELLING_TRAINING_WORDS
from ddpdoctor.source.vocabulary import (
    COLLECTIVES,
    GLOBAL_RANK_VARIABLES,
    LOCAL_RANK_NAMES,
    LOCAL_RANK_VARIABLES,
    RANK_NAMES,
    is_first_rank_name,
)

_SYNCHRONISING = frozenset(name.rpartition(".")[2] for name in COLLECTIVES if ".checkpoint." not in name) | {
    "new_group",
    "wait_for_everyone",
    "backward",
}
_TELLING = (
    _SYNCHRONISING
    | RANK_NAMES
    | LOCAL_RANK_NAMES
    | GLOBAL_RANK_VARIABLES
    | LOCAL_RANK_VARIABLES
    | TELLING_WORDS
    | TELLING_TRAINING_WORDS
    | {
        "DataLoader",
        "DistributedSampler",
        "DistributedDataParallel",
        "DataParallel",
        "set_epoch",
        "set_device",
        "device_count",
        "get_rank",
        "get_world_size",
        "is_initialized",
        "no_sync",
        "spawn",
        "Process",
        "parse_args",
        "Module",
        "Dataset",
        "register_buffer",
    }
)
_NEARLY_FREE = 12
"""Functions of fewer nodes are walked whatever they mention."""
_TOO_COMMON = frozenset(
    {"get", "update", "append", "join", "format", "items", "keys", "values", "split", "strip", "add", "pop"}
)
"""Method names that say nothing about which function is called."""


class Mentions(msgspec.Struct, frozen=True):
    """Bare names of the functions, methods and classes of a script that lead to something."""

    synchronising: frozenset[str]
    """Those that may run a collective."""
    telling: frozenset[str]
    """Those that may do or know anything that checks ask about."""


def mentions_of(modules: Sequence[Module]) -> Mentions:
    """Follow names from function to function; a name stands for every function that is called so."""
    synchronising: set[str] = set()
    telling: set[str] = set()
    callers: dict[str, set[str]] = {}
    for module in modules:
        known: _ModuleMentions | None = module.__dict__.get("_mentions")
        if known is None:
            known = module.__dict__["_mentions"] = _in_module(module)
        synchronising |= known.synchronising
        telling |= known.telling
        for name, found in known.callers.items():
            callers.setdefault(name, set()).update(found)
    return Mentions(_with_callers(synchronising, callers), _with_callers(telling, callers))


def adds_key(node: ast.If) -> bool:
    """Whether a condition decides whether a dict gets a key: who goes over the dict has to know."""
    return any(
        isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant)
        for statement in node.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
    )


def is_small(node: ast.AST) -> bool:
    """Whether walking a function costs next to nothing."""
    waiting = [node]
    for seen in waiting:
        waiting.extend(children_of(seen))
        if len(waiting) > _NEARLY_FREE * 3:
            return False
    return True


class _ModuleMentions(msgspec.Struct, frozen=True):
    """What the text of one module says."""

    synchronising: frozenset[str]
    """Definitions in which a synchronising word stands."""
    telling: frozenset[str]
    callers: Mapping[str, frozenset[str]]
    """Definitions that call a name or derive from it."""


class _Definition:
    """The words of one function or class, those of inner definitions included once they are added."""

    def __init__(self, name: str, outer: _Definition | None) -> None:
        self.name = name
        self.outer = outer
        self.used: set[str] = set()
        self.calls: set[str] = set()


def _in_module(module: Module) -> _ModuleMentions:
    found: dict[int, _Definition] = {}
    places = module.definitions
    for position, node in enumerate(module.nodes):
        place = places[position]
        if place == position and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inside = found[position] = _Definition(node.name, found.get(module.outer_definitions[position]))
            if isinstance(node, ast.ClassDef):
                inside.calls.update(_last_name(base) for base in node.bases)
        elif place >= 0:
            _note_words(module, node, found[place])
    definitions = list(found.values())
    synchronising: set[str] = set()
    telling: set[str] = set()
    callers: dict[str, set[str]] = {}
    for definition in reversed(definitions):
        if any(is_first_rank_name(word) for word in definition.used):
            definition.used.add("rank")
        if definition.outer is not None:
            definition.outer.used |= definition.used
            definition.outer.calls |= definition.calls
        if not definition.used.isdisjoint(_SYNCHRONISING):
            synchronising.add(definition.name)
        if not definition.used.isdisjoint(_TELLING):
            telling.add(definition.name)
        for name in definition.calls - _TOO_COMMON:
            callers.setdefault(name, set()).add(definition.name)
    frozen = {name: frozenset(found) for name, found in callers.items()}
    return _ModuleMentions(frozenset(synchronising), frozenset(telling), frozen)


def _note_words(module: Module, node: ast.AST, inside: _Definition) -> None:
    """Keep names and constants in a definition, and the names among them that are called."""
    used = inside.used
    if isinstance(node, ast.Name):
        used.add(node.id)
        full = module.aliases.get(node.id)
        if full is not None:
            used.add(full.rpartition(".")[2])
    elif isinstance(node, ast.Attribute):
        used.add(node.attr)
        if (node.attr == "save" and module.resolve(node) == "torch.save") or (
            worth_walking(node.attr) and module.resolve(node) in NOTED_CALLS
        ):
            used.add("DataLoader")
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            used.add(node.value)
    elif isinstance(node, ast.arg):
        used.add(node.arg)
    elif isinstance(node, (ast.Yield, ast.YieldFrom)) or (isinstance(node, ast.If) and adds_key(node)):
        used.add("DataLoader")
    elif isinstance(node, ast.Call):
        inside.calls.add(_last_name(node.func))


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _with_callers(found: set[str], callers: Mapping[str, set[str]]) -> frozenset[str]:
    waiting = list(found)
    while waiting:
        for caller in callers.get(waiting.pop(), ()):
            if caller not in found:
                found.add(caller)
                waiting.append(caller)
    return frozenset(found)
