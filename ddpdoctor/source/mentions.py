"""What functions may lead to, by the names used in them and in the functions that they call."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence

import msgspec

from ddpdoctor.source.deciding_names import deciding_names
from ddpdoctor.source.module import Module
from ddpdoctor.source.nodes import NodeIndex, children_of, last_name
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
_OF_ITS_OWN = frozenset(
    {"no_grad", "inference_mode", "set_grad_enabled", "eval", "item", "tolist", "isnan", "isfinite"}
    | {"time", "monotonic", "perf_counter", "random", "exists", "isfile", "is_file", "listdir", "glob"}
)
"""Words of functions that may return what only their rank knows: of its batches, its clock, its files."""
_STOPS = re.compile(r"patience|early_?stop|(should|must|want|want_to|to|do)_stop|stop_?training", re.IGNORECASE)
"""Of words in functions that decide whether ranks go on training."""
_NEARLY_FREE = 12
"""Functions of fewer nodes are walked whatever they mention."""
MOST_WORDS = 100_000
"""Words whose meanings are kept for the next module."""
LONGEST_WORD = 100
"""Characters; longer texts are no words."""
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
    own: set[str] = set()
    callers: dict[str, list[frozenset[str]]] = {}
    defined: set[str] = set()
    for module in modules:
        known: _ModuleMentions | None = module.__dict__.get("_mentions")
        if known is None:
            known = module.__dict__["_mentions"] = _in_module(module)
        synchronising |= known.synchronising
        telling |= known.telling
        own |= known.own
        defined |= known.defined
    for module in modules:
        found: Mapping[str, frozenset[str]] = module.__dict__["_mentions"].callers
        for name in found.keys() & defined:
            callers.setdefault(name, []).append(found[name])
    if own:
        telling |= {name for module in modules for name in own & _deciding_in(module)}
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


def _deciding_in(module: Module) -> frozenset[str]:
    names: frozenset[str] | None = module.__dict__.get("_deciding_names")
    if names is None:
        names = module.__dict__["_deciding_names"] = deciding_names(module)
    return names


class _ModuleMentions(msgspec.Struct, frozen=True):
    """What the text of one module says."""

    synchronising: frozenset[str]
    """Definitions in which a synchronising word stands."""
    telling: frozenset[str]
    own: frozenset[str]
    """Definitions that matter if what they return decides something: it may be what only their rank knows."""
    defined: frozenset[str]
    """All definitions: only what one of these is called can lead from one to another."""
    callers: Mapping[str, frozenset[str]]
    """Definitions that call a name or derive from it."""


_SYNCHRONISES = 1
_TELLS = 2
_MAY_BE_NOTED = 4
"""The word is the last name of a function whose calls are noted: its full name decides."""
_OWN = 8


class _Meanings(dict[str, int]):
    """What the words of scripts say, as sums of the numbers above; each word is judged once."""

    def __missing__(self, word: str) -> int:
        first = is_first_rank_name(word)
        meaning = (
            (_SYNCHRONISES if word in _SYNCHRONISING else 0)
            | (_TELLS if word in _TELLING or first or _STOPS.search(word) else 0)
            | (_OWN if word in _OF_ITS_OWN else 0)
            | (_MAY_BE_NOTED if word == "save" or worth_walking(word) else 0)
        )
        if len(self) < MOST_WORDS:
            self[word] = meaning
        return meaning


_MEANINGS = _Meanings()


def _in_module(module: Module) -> _ModuleMentions:
    index = module.index
    meanings, calls = _words_of(module), _calls_of(index)
    synchronising: set[str] = set()
    telling: set[str] = set()
    own: set[str] = set()
    callers: dict[str, set[str]] = {}
    for place in sorted(index.outer_definitions, reverse=True):
        name: str = index.nodes[place].name  # type: ignore[attr-defined]
        meaning, called, outer = meanings.get(place, 0), calls.get(place, set()), index.outer_definitions[place]
        if outer >= 0:
            meanings[outer] = meanings.get(outer, 0) | meaning
            calls.setdefault(outer, set()).update(called)
        if meaning & _SYNCHRONISES:
            synchronising.add(name)
        if meaning & _TELLS:
            telling.add(name)
        elif meaning & _OWN:
            own.add(name)
        for word in called - _TOO_COMMON:
            callers.setdefault(word, set()).add(name)
    return _ModuleMentions(
        synchronising=frozenset(synchronising),
        telling=frozenset(telling),
        own=frozenset(own),
        defined=frozenset(index.nodes[place].name for place in index.outer_definitions),  # type: ignore[attr-defined]
        callers={name: frozenset(found) for name, found in callers.items()},
    )


def _words_of(module: Module) -> dict[int, int]:
    """What the words in each definition say, by the place of the definition, those of inner definitions left out."""
    index, meanings = module.index, _MEANINGS
    around = index.definitions
    names, attributes = index.of(ast.Name), index.of(ast.Attribute)
    # Most words say nothing: each is judged once, and then the nodes of those that say something are looked for.
    telling = {word: meaning for word in {name.id for name in names} if (meaning := meanings[word])}
    for word, full in module.aliases.items():
        meaning = meanings[full.rpartition(".")[2]]
        if meaning:
            telling[word] = telling.get(word, 0) | meaning
    said = [
        (around[place], telling[name.id])
        for place, name in zip(index.places(ast.Name), names, strict=True)
        if name.id in telling
    ]
    telling = {word: meaning for word in {node.attr for node in attributes} if (meaning := meanings[word])}
    for place, attribute in zip(index.places(ast.Attribute), attributes, strict=True):
        if attribute.attr in telling:
            meaning = telling[attribute.attr]
            noted = meaning & _MAY_BE_NOTED and _is_noted(module.resolve(attribute))
            said.append((around[place], meaning | _TELLS if noted else meaning))
    for place, constant in zip(index.places(ast.Constant), index.of(ast.Constant), strict=True):
        text = constant.value
        if isinstance(text, str) and len(text) <= LONGEST_WORD and meanings[text]:
            said.append((around[place], meanings[text]))
    for place, argument in zip(index.places(ast.arg), index.of(ast.arg), strict=True):
        said.append((around[place], meanings[argument.arg]))
    for place, condition in zip(index.places(ast.If), index.of(ast.If), strict=True):
        if adds_key(condition):
            said.append((around[place], _TELLS))
    said += [(around[place], _TELLS) for place in index.places(ast.Yield, ast.YieldFrom)]
    found: dict[int, int] = {}
    for place, meaning in said:
        found[place] = found.get(place, 0) | meaning
    return found


def _is_noted(full: str) -> bool:
    return full == "torch.save" or full in NOTED_CALLS


def _calls_of(index: NodeIndex) -> dict[int, set[str]]:
    """The last names of what each definition calls or derives from, by the place of the definition."""
    found: dict[int, set[str]] = {}
    for place, call in zip(index.places(ast.Call), index.of(ast.Call), strict=True):
        found.setdefault(index.definitions[place], set()).add(last_name(call.func))
    for place, cls in zip(index.places(ast.ClassDef), index.of(ast.ClassDef), strict=True):
        found.setdefault(place, set()).update(last_name(base) for base in cls.bases)
    return found


def _with_callers(found: set[str], callers: Mapping[str, Sequence[frozenset[str]]]) -> frozenset[str]:
    waiting = list(found)
    while waiting:
        for group in callers.get(waiting.pop(), ()):
            new = group - found
            found |= new
            waiting.extend(new)
    return frozenset(found)
