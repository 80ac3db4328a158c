"""Code that a setting names: a member of a table, of a module or of an object by a name that is put together."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable
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
# Methods that make a text of one, with the number of the texts that they are given.
_TAKES = {"lower": 0, "upper": 0, "strip": 0, "capitalize": 0, "title": 0, "replace": 2}


def named_like(machine: Machine, node: ast.AST, written: ast.AST | None, owner: Value) -> Value | None:
    """Return the functions and classes among which ``getattr(owner, f"start_{how}")`` chooses; None without any.

    ``written`` is the name in what ``node`` looks up.
    """
    template = template_of(machine.frame.module, written) if isinstance(written, ast.expr) else ""
    if UNKNOWN_PART not in template:
        return None
    if len(template.replace(UNKNOWN_PART, "")) < _SHORTEST:
        return _ways_to_train(machine, node, owner)
    members = _members(machine, owner)
    return _one_of(attribute_of(machine, owner, name) for name in members if may_be(template, name))


def named_by_default(machine: Machine, written: ast.AST | None, key: Value, owner: Value) -> Value | None:
    """Return the code of a module, or the method of an object, that the default of a setting names; None without."""
    name = _name_by_default(machine, written, key, _members(machine, owner))
    found = attribute_of(machine, owner, name) if name else NONE
    return found if _is_code(found) else None


def _name_by_default(machine: Machine, written: ast.AST | None, key: Value, names: Collection[object]) -> str:
    """Return the one of some names that a text is where each setting in it has its default; empty for none."""
    known = isinstance(written, ast.expr) and not is_varying(key)
    found = {text for text in texts_of(machine, written) if text in names} if known else set()  # type: ignore[arg-type]
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


def member_of(machine: Machine, written: ast.AST, key: Value, table: DictValue) -> Value | None:
    """Return the code that a table has for a key: what the default of a setting names, or one that represents all.

    None where neither is known. This is for tables with more members than are followed side by side, and chooses code,
    no more: a condition on the setting stays open.
    """
    members = dict(table.entries)
    found = members.get(_name_by_default(machine, written, key, members), NONE)
    if _is_code(found):
        return found
    classes = [one for one in members.values() if isinstance(one, ProjectClass)]
    return _representative(machine, classes) if len(classes) == len(members) and not is_varying(key) else None


def _is_code(value: Value) -> bool:
    if isinstance(value, SequenceValue):
        return any(map(_is_code, value.values))
    return isinstance(value, (Function, ProjectClass, Partial, Instance, ProjectModule))


def _representative(machine: Machine, classes: Collection[ProjectClass]) -> Value | None:
    """Return the class that adds least to what all of several inherit from one of the project; None without such.

    What is found in the inherited code holds whichever class is chosen, for this one has replaced the least of it; what
    is found in the little that is its own holds in a job that chooses it.
    """
    families = [set(family(machine, cls)) for cls in classes]
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
    name = part.slice.value if isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Constant) else None
    name = last_name(part) or name
    if frame.owner is not None and isinstance(part, ast.Name) and name in signature_of(frame.owner.node).all_names:
        signature = signature_of(frame.owner.node)
        place = signature.names.index(name) - bool(frame.owner.receiver) if name in signature.names else -1
        if (given := argument_of(frame.call, name, place)) is not None and len(machine.frames) + depth > 0:
            return texts_of(machine, given, depth - 1, turns)
        if isinstance(default := signature.defaults.get(name), ast.Constant):
            return texts_of(machine, default, depth, turns)
    return defaults_of(modules, name) if isinstance(name, str) else ()


def _of_call(machine: Machine, call: ast.Call, depth: int, turns: int) -> Collection[str]:
    """Return the texts that a method makes of one, or that a setting has which is read by its name."""
    name = last_name(call.func)
    texts = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    if name in ("get", "getattr") and texts:
        return defaults_of(machine.script.modules, texts[0]) or texts[1:]
    if isinstance(call.func, ast.Attribute) and _TAKES.get(name) == len(texts) == len(call.args):
        return [getattr(text, name)(*texts) for text in texts_of(machine, call.func.value, depth, turns)]
    return texts_of(machine, call.args[0], depth, turns) if name == "str" and call.args else ()
