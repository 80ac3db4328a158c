"""What functions may lead to, by the names used in them and in the functions that they call."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ddpdoctor.source.module import Module
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
    words: dict[str, set[str]] = {}
    called: dict[str, set[str]] = {}
    for module in modules:
        for node in module.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                used, calls = _words(module, node)
                words.setdefault(node.name, set()).update(used)
                called.setdefault(node.name, set()).update(calls)
    return Mentions(_leading_to(words, called, _SYNCHRONISING), _leading_to(words, called, _TELLING))


def is_small(node: ast.AST) -> bool:
    """Whether walking a function costs next to nothing."""
    return sum(1 for _ in zip(ast.walk(node), range(_NEARLY_FREE * 4), strict=False)) < _NEARLY_FREE * 4


def _words(module: Module, definition: ast.AST) -> tuple[set[str], set[str]]:
    """Names and constants in a definition, and the names among them that are called or derived from."""
    used: set[str] = set()
    calls: set[str] = set()
    bases: Iterable[ast.expr] = definition.bases if isinstance(definition, ast.ClassDef) else ()
    for node in ast.walk(definition):
        if isinstance(node, ast.Name):
            used.add(node.id)
            used.add(module.aliases.get(node.id, "").rpartition(".")[2])
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
            if node.attr == "save" and module.resolve(node) == "torch.save":
                used.add("DataLoader")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used.add(node.value)
        elif isinstance(node, ast.arg):
            used.add(node.arg)
        elif isinstance(node, ast.Call):
            calls.add(_last_name(node.func))
    calls.update(_last_name(base) for base in bases)
    if any(is_first_rank_name(word) for word in used):
        used.add("rank")
    return used, calls - _TOO_COMMON


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _leading_to(
    words: Mapping[str, set[str]], called: Mapping[str, set[str]], wanted: frozenset[str]
) -> frozenset[str]:
    callers: dict[str, set[str]] = {}
    for caller, names in called.items():
        for name in names:
            callers.setdefault(name, set()).add(caller)
    found = {name for name, used in words.items() if used & wanted}
    waiting = list(found)
    while waiting:
        for caller in callers.get(waiting.pop(), ()):
            if caller not in found:
                found.add(caller)
                waiting.append(caller)
    return frozenset(found)
