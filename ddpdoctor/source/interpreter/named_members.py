"""Code that a setting names: a member of a table, of a module or of an object by a name that is put together."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Sequence
from functools import reduce

from ddpdoctor.source.interpreter.attributes import attribute_of, family
from ddpdoctor.source.interpreter.scopes import signature_of
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    MAXIMUM_OPTIONS,
    NONE,
    BoundMethod,
    Const,
    DictValue,
    Function,
    Instance,
    Partial,
    ProjectClass,
    ProjectModule,
    SequenceValue,
    Value,
    is_varying,
    join,
)
from ddpdoctor.source.script.module import argument_of, descend, last_name
from ddpdoctor.source.script.named_code import UNKNOWN_PART, defaults_of, may_be, spelled, template_of

_SHORTEST = 3
"""Characters that must be known of a name that is put together: `step_` names a family, `_` does not."""
_LONGEST_WAY = 8
"""Assignments and calls through which the parts of a text are looked for."""
TEXT_METHODS = frozenset({"lower", "upper", "strip", "capitalize", "title"})
"""Methods that make a text of one, and are given nothing."""


def named_member(machine: Machine, node: ast.AST, key: Value, owner: Value) -> Value | None:
    """Return what a look-up by a name that is not known gives: code among which ``getattr(owner, f"start_{how}")``
    chooses, one of few classes of a module, or what the name is by default; None where that is not known.
    """
    written = _written(node)
    template = template_of(machine.frame.module, written)
    if UNKNOWN_PART in template:
        known = len(template.replace(UNKNOWN_PART, "")) >= _SHORTEST
        like = [name for name in _members(machine, owner) if may_be(template, name)] if known else []
        held = [attribute_of(machine, owner, name) for name in like]
        if found := _one_of(held) if known else _ways_to_train(machine, node, owner):
            return found
    of_getattr = isinstance(node, ast.Call) and len(node.args) == 2 and isinstance(owner, ProjectModule)
    if is_varying(key):
        return None
    name = _name_by_default(machine, written, _members(machine, owner))
    by_default = attribute_of(machine, owner, name) if name else NONE
    return (one_class_of(machine, owner) if of_getattr else None) or (by_default if _is_code(by_default) else None)


def one_class_of(machine: Machine, module: ProjectModule) -> Value | None:
    """Return the classes of which a module of the project offers one by a name that is not known; None of many."""
    held = machine.store.held(machine.scope_modules.get(module.name, -1))
    return _one_of(dict.fromkeys(one for one in held if isinstance(one, ProjectClass)))


def _written(node: ast.AST) -> ast.expr:
    """Return the name in a look-up: by a subscript, by ``getattr``, or by a method."""
    if isinstance(node, ast.Subscript):
        return node.slice
    of_getattr = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return node.args[of_getattr] if isinstance(node, ast.Call) and len(node.args) > of_getattr else ast.Constant("")


def _name_by_default(machine: Machine, written: ast.expr, names: Collection[object]) -> str:
    """Return the one of some names that a text is where each setting in it has its default; empty for none."""
    found = {text for text in texts_of(machine, written) if text in names}
    return found.pop() if len(found) == 1 else ""


def _members(machine: Machine, owner: Value) -> Collection[str]:
    """Return the names in a module, or in the classes of an object."""
    scopes: list[int] = []
    if isinstance(owner, ProjectModule):
        scopes = [machine.scope_modules.get(owner.name, -1)]
    elif isinstance(owner, Instance):
        scopes = [cls.scope for cls in family(machine, owner.cls)]
    return dict.fromkeys(name for scope in scopes for name in machine.store.names(scope))


def _one_of(held: Iterable[Value]) -> Value | None:
    """Return one of the functions and classes among some values; None without any, or of many."""
    found: list[Value] = [one for one in held if isinstance(one, (Function, ProjectClass))]
    return reduce(join, found) if 0 < len(found) <= MAXIMUM_OPTIONS else None


def _ways_to_train(machine: Machine, node: ast.AST, owner: Value) -> Value | None:
    """Return the methods that lead to a collective of an object whose method a setting chooses and that is called."""
    around = machine.frame.module.parents.get(node)
    if not isinstance(owner, Instance) or not isinstance(around, ast.Call) or around.func is not node:
        return None
    names = (name for name in machine.store.names(owner.cls.scope) if not name.startswith("_"))
    return _one_of(attribute_of(machine, owner, name) for name in names if name in machine.mentions.synchronising)


def member_of(machine: Machine, node: ast.AST, key: Value, table: DictValue) -> Value | None:
    """Return the code that a table has for a key: what the default of a setting names, or one that represents all.

    None where neither is known. This is for tables with more members than are followed side by side, and chooses code,
    no more: a condition on the setting stays open. ``node`` is the look-up.
    """
    if is_varying(key):
        return None
    members = dict(table.entries)
    found = members.get(_name_by_default(machine, _written(node), members), NONE)
    return found if _is_code(found) else _representative(machine, list(members.values()))


def _is_code(value: Value) -> bool:
    if isinstance(value, SequenceValue):
        return any(map(_is_code, value.values))
    return isinstance(value, (Function, ProjectClass, Partial, Instance, ProjectModule))


def _representative(machine: Machine, members: Sequence[Value]) -> Value | None:
    """Return the class that adds least to what all of several inherit from one of the project; None without such.

    What is found in the inherited code holds whichever class is chosen, for this one has replaced the least of it; what
    is found in the little that is its own holds in a job that chooses it.
    """
    classes = [one for one in members if isinstance(one, ProjectClass)]
    families = [set(family(machine, cls)) for cls in classes] if len(classes) == len(members) else []
    shared = families[0].intersection(*families) if families else ()
    return min(classes, key=lambda cls: len(machine.store.names(cls.scope))) if shared else None


def texts_of(machine: Machine, node: ast.expr, depth: int = -1, turns: int = 0) -> Collection[str]:
    """Return the texts that an expression in the code of a frame has where each setting in it has its default."""
    return spelled(node, lambda part: _of_part(machine, part, depth, turns + 1)) if turns < _LONGEST_WAY else ()


def _of_part(machine: Machine, part: ast.expr, depth: int, turns: int) -> Collection[str]:
    frame, modules = machine.frames[depth], machine.script.modules
    if isinstance(part, ast.Call):
        return _of_call(machine, part, depth, turns)
    value = machine.held(part, frame)
    if isinstance(value, Const) and isinstance(value.value, str):
        return (value.value,)
    if isinstance(value, BoundMethod):
        return defaults_of(modules, value.name)
    around = frame.owner.node if frame.owner is not None else frame.module.tree
    made = [one for one in frame.module.assigned(around, part) if part not in descend(one)]
    if len(made) == 1:
        return texts_of(machine, made[0], depth, turns)
    name = last_name(part) or getattr(getattr(part, "slice", None), "value", None)
    if frame.owner is not None and isinstance(part, ast.Name):
        signature = signature_of(frame.owner.node)
        place = signature.names.index(name) - bool(frame.owner.receiver) if name in signature.names else -1
        given = argument_of(frame.call, part.id, place) if frame.call is not None else None
        if given is not None and name in signature.all_names:
            return texts_of(machine, given, depth - 1, turns)
        if isinstance(default := signature.defaults.get(part.id), ast.Constant):
            return (str(default.value),)
    return defaults_of(modules, name)


def _of_call(machine: Machine, call: ast.Call, depth: int, turns: int) -> Collection[str]:
    """Return the texts that a method makes of one, or that a setting has which is read by its name."""
    name = last_name(call.func)
    texts = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    if name in ("get", "getattr") and texts:
        return defaults_of(machine.script.modules, texts[0]) or texts[1:]
    if isinstance(call.func, ast.Attribute) and name in TEXT_METHODS and not call.args:
        return [getattr(text, name)() for text in texts_of(machine, call.func.value, depth, turns)]
    return texts_of(machine, call.args[0], depth, turns) if name == "str" and call.args else ()
