"""What functions lead to: collectives, by the names used in them and in what they call, and one function, followed."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence, Set

import msgspec

from ddpdoctor.source.script.module import Module, NodeIndex, descend, last_name, once
from ddpdoctor.source.vocabulary import COLLECTIVES, SAME, canonical, collective_methods

_SYNCHRONISING = frozenset(name.rpartition(".")[2] for name in COLLECTIVES if ".checkpoint." not in name) | {
    "new_group",
    "wait_for_everyone",
    "backward",
    *("full_tensor", "fully_shard", "parallelize_module", "init_device_mesh"),
    *("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict"),
}
# Method names that do not show which function is called.
_TOO_COMMON = frozenset(
    {"get", "update", "append", "join", "format", "items", "keys", "values", "split", "strip", "add", "pop"}
)


class Mentions(msgspec.Struct, frozen=True):
    """Bare names of the functions, methods and classes of a script that lead to something."""

    synchronising: frozenset[str]
    """Those that may run a collective."""


def mentions_of(modules: Sequence[Module]) -> Mentions:
    """Follow names from function to function; a name stands for every function that is called so."""
    synchronising: set[str] = set()
    callers: dict[str, list[frozenset[str]]] = {}
    defined: set[str] = set()
    for module in modules:
        known = _in_module(module)
        synchronising |= known.synchronising
        defined |= known.defined
    for module in modules:
        found: Mapping[str, frozenset[str]] = _in_module(module).callers
        for name in found.keys() & defined:
            callers.setdefault(name, []).append(found[name])
    return Mentions(_with_callers(synchronising, callers))


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Place = tuple[Module, Definition]
MAXIMUM_FOLLOWED = 200
"""Definitions that are looked into for one question: a launch is a few calls away from the group that it starts."""


def leads_to(module: Module, definition: Definition, wanted: str, modules: Sequence[Module]) -> bool:
    """Return whether a function calls another one of a full name, itself or in what it calls of the project.

    Calls are followed by the imports that bring their names, by ``self`` to the methods of the class around, and from
    a class to its constructor; methods of other objects are not.
    """
    by_name = {one.name: one for one in modules}
    waiting: list[Place] = [(module, definition)]
    seen: set[ast.AST] = set()
    last = wanted.rpartition(".")[2]
    while waiting and len(seen) < MAXIMUM_FOLLOWED:
        where, node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        for call in (inner for inner in descend(node) if isinstance(inner, ast.Call)):
            if last_name(call.func) == last or where.resolve(call.func) == wanted:
                return True
            waiting.extend(_called(where, call.func, by_name))
    return False


def _called(module: Module, function: ast.expr, by_name: Mapping[str, Module]) -> Iterator[Place]:
    """Yield what a call runs of the project: a function, or the constructor of a class."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self":
        owner = next((one for one in module.ancestors(function) if isinstance(one, ast.ClassDef)), None)
        yield from ((module, one) for one in _members(owner, function.attr))
        return
    found = _defined(module, function.id) if isinstance(function, ast.Name) else None
    found = found or _imported(module.resolve(function), by_name)
    if found is None:
        return
    where, definition = found
    if isinstance(definition, ast.ClassDef):
        yield from ((where, one) for one in _members(definition, "__init__"))
    else:
        yield found


def _imported(full: str, by_name: Mapping[str, Module]) -> Place | None:
    """Return the definition of a full name, also where a package only passes it on."""
    for _ in range(len(by_name)):
        owner, _, name = full.rpartition(".")
        module = by_name.get(owner)
        if module is None:
            return None
        found = _defined(module, name)
        if found is not None:
            return found
        full = module.aliases.get(name, "")
    return None


def _defined(module: Module, name: str) -> Place | None:
    for statement in module.tree.body:
        if isinstance(statement, Definition) and statement.name == name:
            return module, statement
    return None


def _members(cls: ast.ClassDef | None, name: str) -> Iterator[Definition]:
    for statement in cls.body if cls is not None else ():
        if isinstance(statement, Definition) and statement.name == name:
            yield statement


class _ModuleMentions(msgspec.Struct, frozen=True):
    """Mentions in the text of one module."""

    synchronising: frozenset[str]
    """Definitions in which a synchronising word stands."""
    defined: frozenset[str]
    """All definitions: only what one of these is called can lead from one to another."""
    callers: Mapping[str, frozenset[str]]
    """Definitions that call a name or derive from it."""


@once
def _in_module(module: Module) -> _ModuleMentions:
    index = module.index
    places_found, calls = _synchronising_places(module), _calls_of(index)
    synchronising: set[str] = set()
    callers: dict[str, set[str]] = {}
    for place in sorted(index.outer_definitions, reverse=True):
        name: str = index.nodes[place].name  # type: ignore[attr-defined]
        called, outer = calls.get(place, set()), index.outer_definitions[place]
        if outer >= 0:
            calls.setdefault(outer, set()).update(called)
        if place in places_found:
            synchronising.add(name)
            places_found.add(outer)
        for word in called - _TOO_COMMON:
            callers.setdefault(word, set()).add(name)
    return _ModuleMentions(
        synchronising=frozenset(synchronising),
        defined=frozenset(index.nodes[place].name for place in index.outer_definitions),  # type: ignore[attr-defined]
        callers={name: frozenset(found) for name, found in callers.items()},
    )


def _synchronising_places(module: Module) -> set[int]:
    """Return the places of the definitions in which a synchronising word stands, without those around them."""
    index, around = module.index, module.index.definitions
    words = _SYNCHRONISING | {
        word for word, full in module.aliases.items() if canonical(full).rpartition(".")[2] in _SYNCHRONISING
    }
    kinds: tuple[tuple[type[ast.AST], str, Set[str]], ...] = (
        (ast.Name, "id", words),
        (ast.Attribute, "attr", _SYNCHRONISING | _methods_of(module)),
        (ast.Constant, "value", _SYNCHRONISING),
    )
    return {
        around[place]
        for kind, field, wanted in kinds
        for place, node in zip(index.places(kind), index.of(kind), strict=True)
        if getattr(node, field) in wanted
    }


def _methods_of(module: Module) -> set[str]:
    """Return the last names of what a module may call of imported libraries that rename torch's collectives."""
    imported = set(module.aliases.values())
    found = {name for owner in imported for name in collective_methods(owner)}
    found |= {"compute"} if "torchmetrics" in imported else set()
    renamed = (theirs for theirs, ours in SAME.items() if ours in COLLECTIVES and theirs.rpartition(".")[0] in imported)
    return found.union(theirs.rpartition(".")[2] for theirs in renamed)


def _calls_of(index: NodeIndex) -> dict[int, set[str]]:
    """Return the last names of what each definition calls or derives from, by the place of the definition."""
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
