"""Import statements: project modules are run when they are first imported, everything else is known by its name."""

from __future__ import annotations

import ast
from functools import partial

from ddpdoctor.source.interpreter.attributes import attribute_of
from ddpdoctor.source.interpreter.scopes import CallFrame
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import UNIFORM, Arguments, External, ProjectModule, Unknown, Value, constant
from ddpdoctor.source.script.module import Module, absolute
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
    """Return what ``importlib.import_module`` gives: a project module, run as an import statement runs it."""
    name = constant(given.value("name", 0) or UNIFORM)
    if isinstance(name, str) and name.replace(".", "").isidentifier() and machine.script.module(name) is None:
        return External(canonical(name))
    if not isinstance(name, str) or machine.script.module(name) is None:
        return Unknown(opaque=True)
    return _module_value(machine, name)


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
        machine.loops = loops


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
