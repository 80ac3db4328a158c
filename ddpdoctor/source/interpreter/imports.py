"""Import statements: project modules are run when they are first imported, everything else is known by its name."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import partial, reduce

from ddpdoctor.source.interpreter.attributes import attribute_of, texts_of
from ddpdoctor.source.interpreter.scopes import CallFrame
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    MAXIMUM_OPTIONS,
    OPAQUE,
    UNIFORM,
    Arguments,
    External,
    ProjectModule,
    Unknown,
    Value,
    constant,
    join,
)
from ddpdoctor.source.script.module import Module, absolute, argument_of, last_name
from ddpdoctor.source.script.written_paths import absolute_name, may_be, registers, template_of
from ddpdoctor.source.vocabulary import canonical

_SHALLOW = frozenset({ast.Import, ast.ImportFrom})
"""Statements in which nothing is nested: what an imported module holds is guarded there."""


def run_import(machine: Machine, statement: ast.Import | ast.ImportFrom) -> None:
    """Bind what an import statement binds."""
    scope = machine.frame.scope
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            whole = _module_value(machine, alias.name)
            head = alias.name.partition(".")[0]
            value = whole if alias.asname or "." not in alias.name else _module_value(machine, head)
            machine.assign(scope, alias.asname or head, value)
        return
    module = absolute(statement.module or "", statement.level, machine.frame.module.package)
    for alias in statement.names:
        if alias.name == "*":
            _star(machine, module)
            continue
        machine.assign(scope, alias.asname or alias.name, _member(machine, module, alias.name))


def import_by_name(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return what ``importlib.import_module`` or ``__import__`` gives: a module, run as an import statement runs it.

    By a name that is not known it is what the default of a setting names, or one of few of the project; all of these
    run where nothing is made of the result: they are imported for what they register.
    """
    name = constant(given.value("name", 0) or UNIFORM)
    known = (absolute_name(machine.frame.module, node, name),) if isinstance(name, str) else ()
    found = known or _possible(machine, node)
    if not all(one.replace(".", "").isidentifier() for one in found):
        return OPAQUE
    modules = [_module_value(machine, one) for one in found]
    if isinstance(node, ast.Call) and last_name(node.func) == "__import__" and not given.value("fromlist", 3):
        modules = [_module_value(machine, one.partition(".")[0]) for one in found]
    return reduce(join, modules) if 0 < len(modules) <= MAXIMUM_OPTIONS else OPAQUE


def _possible(machine: Machine, node: ast.AST) -> Sequence[str]:
    """Return the modules of the project that a call may import by a name with parts that are not known."""
    module, written = machine.frame.module, argument_of(node, "name", 0)
    if written is None:
        return ()
    texts = {absolute_name(module, node, text) for text in texts_of(machine, written)}
    named = [text for text in texts if machine.script.module(text) is not None]
    template = absolute_name(module, node, template_of(module, written))
    package = template.rpartition(".")[0]
    among = [one.name for one in machine.script.modules if package and may_be(template, one.name)]
    if registers(module, node):
        return among
    return named if len(named) == 1 else among if len(among) <= MAXIMUM_OPTIONS else ()


def named_value(machine: Machine, name: str) -> Value:
    """Return what a full name stands for: in the longest part that is a project module, or else in a library."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        if machine.script.module(".".join(parts[:length])) is not None:
            value = _member(machine, ".".join(parts[:length]), parts[length])
            for part in parts[length + 1 :]:
                value = attribute_of(machine, value, part)
            return value
    return External(canonical(name))


def run_module(machine: Machine, module: Module) -> None:
    """Run the top level of a project module, once."""
    if module.name in machine.scope_modules:
        return
    scope = machine.number()
    machine.scope_modules[module.name] = scope
    machine.frames.append(CallFrame("", module, scope, ()))
    loops, machine.loops = machine.loops, []
    # It runs once, and what it writes stays, even where the loop or the arm around its import is taken back.
    journals, machine.store.journals = machine.store.journals, []
    try:
        for statement in module.tree.body:
            if statement.__class__ in _SHALLOW or (
                isinstance(statement, ast.FunctionDef) and not statement.decorator_list
            ):
                machine.execute((statement,))
                continue
            run = partial(machine.execute, (statement,))
            inner = machine.collect_safely(run, module.tree, lambda: f"module level ({module.path})")
            for rank, items in enumerate(inner):
                machine.sinks[rank].extend(items)
    finally:
        machine.frames.pop()
        machine.loops, machine.store.journals = loops, journals


def _module_value(machine: Machine, name: str) -> Value:
    module = machine.script.module(name)
    if module is None:
        return ProjectModule(name) if machine.script.is_package(name) else External(canonical(name))
    run_module(machine, module)
    return ProjectModule(name)


def _member(machine: Machine, module: str, name: str) -> Value:
    owner = machine.script.module(module)
    if owner is not None:
        run_module(machine, owner)
        value = machine.store.get(machine.scope_modules[owner.name], name)
        if value is not None:
            return value
    inner = machine.script.module(f"{module}.{name}")
    if inner is not None:
        run_module(machine, inner)
        return ProjectModule(inner.name)
    if machine.script.is_package(f"{module}.{name}"):
        return ProjectModule(f"{module}.{name}")  # A directory without a file of its own.
    if owner is not None or not module:
        return Unknown(opaque=True)
    return External(canonical(f"{module}.{name}"))


def _star(machine: Machine, module: str) -> None:
    owner = machine.script.module(module)
    if owner is None:
        return
    run_module(machine, owner)
    source = machine.scope_modules[owner.name]
    for name in machine.store.names(source):
        value = machine.store.get(source, name)
        if value is not None and not name.startswith("_"):
            machine.assign(machine.frame.scope, name, value)
