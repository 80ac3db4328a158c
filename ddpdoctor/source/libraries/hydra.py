"""Hydra: what the function under ``hydra.main`` is given, and what ``instantiate`` makes of it."""

from __future__ import annotations

import ast
from functools import reduce

from ddpdoctor.source.interpreter.attributes import family
from ddpdoctor.source.interpreter.imports import named_value
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    OPAQUE,
    OPEN,
    UNIFORM,
    Arguments,
    Const,
    DictValue,
    Function,
    OneOf,
    Partial,
    ProjectClass,
    SequenceValue,
    Value,
    constant,
    join,
    options_of,
)
from ddpdoctor.source.script.settings_files import TARGET, hydra_settings
from ddpdoctor.source.torch_model.external_objects import Handler

_MAXIMUM_DEPTH = 10
"""Of classes of settings within each other: one may hold itself."""


def configure(machine: Machine, function: Function) -> None:
    """Note what the function under ``hydra.main`` is given: the settings that its files and classes hold."""
    arguments = function.node.args.args
    files = hydra_settings(machine.frame.module)
    kind = arguments[0].annotation if arguments else None
    declared = _of_class(machine, machine.evaluate(kind), 0) if kind is not None else None
    settings = _merged(declared, None if files is None else _of_file(files))
    if arguments and settings is not None:
        machine.settings[function.node] = settings


def composed(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return what ``hydra.compose`` gives."""
    files = hydra_settings(machine.frame.module)
    return OPAQUE if files is None else _of_file(files)


def _of_file(content: object) -> Value:
    if isinstance(content, dict):
        kept = {key: _of_file(value) for key, value in content.items()}
        words = (key for key, value in content.items() if key.startswith("_") and isinstance(value, (str, bool)))
        kept.update((key, Const(content[key])) for key in words)
        return DictValue((*kept.items(), (OPEN, OPAQUE)))
    return SequenceValue(tuple(map(_of_file, content))) if isinstance(content, list) else _setting(content)


def _setting(written: object) -> Value:
    """Return what a setting is where whoever starts the job may give another: what is written, or something else."""
    known = isinstance(written, (str, int, float)) and "${" not in str(written)
    return OneOf((Const(written), UNIFORM)) if known else UNIFORM


def _of_class(machine: Machine, cls: Value, depth: int) -> DictValue | None:
    """Return what a class of settings declares: the objects of its fields, by default values and annotations."""
    if not isinstance(cls, ProjectClass) or depth > _MAXIMUM_DEPTH:
        return None
    found: dict[object, Value] = {}
    for one in reversed(family(machine, cls)):
        for node in one.node.body:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            name, default = node.target.id, node.value
            if name.startswith("_"):
                found[name] = Const(default.value) if isinstance(default, ast.Constant) else OPAQUE
                continue
            if isinstance(default, ast.Constant):
                found[name] = _setting(default.value)
                continue
            kind = node.annotation.id if isinstance(node.annotation, ast.Name) else ""
            inner = machine.store.get(machine.scope_modules.get(one.module, -1), kind) or UNIFORM
            found[name] = _of_class(machine, inner, depth + 1) or UNIFORM
    return DictValue((*found.items(), (OPEN, OPAQUE))) if found else None


def _merged(declared: Value | None, written: Value | None) -> Value | None:
    """Return settings of which files override what classes declare."""
    if not isinstance(declared, DictValue) or not isinstance(written, DictValue):
        return written or declared
    whole = dict(declared.entries)
    for key, value in written.entries:
        whole[key] = _merged(whole.get(key), value) or value
    return DictValue(tuple(whole.items()))


def instantiate(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Call what settings name, with what else they hold and what is given beside them."""
    named = dict(given.named)
    positional = list(given.positional)
    config = named.pop("config", None) or (positional.pop(0) if positional else OPAQUE)
    return _made(machine, node, config, Arguments(positional, named, given.complete), 0)


def _made(machine: Machine, node: ast.AST, config: Value, given: Arguments, depth: int) -> Value:
    if isinstance(config, OneOf) and all(isinstance(one, DictValue) for one in options_of(config)):
        return reduce(join, [_made(machine, node, option, given, depth) for option in config.options])
    settings = dict(config.entries) if isinstance(config, DictValue) else {}
    target = constant(settings.get(TARGET, OPAQUE))
    if not isinstance(target, str):
        machine.note_unread(node, given.values)
        return OPAQUE
    nested = constant(settings.get("_recursive_", UNIFORM)) is not False and depth < _MAXIMUM_DEPTH
    named: dict[str, Value] = {}
    for place, (key, value) in enumerate(settings.items()):
        if isinstance(key, str) and not key.startswith("_"):
            named[key] = _inner(machine, node, value, depth, place) if nested else value
    function = named_value(machine, target)
    named.update(given.named)
    if constant(settings.get("_partial_", UNIFORM)) is True:
        return Partial(function, tuple(given.positional), tuple(named.items()))
    return machine.apply(node, function, Arguments(given.positional, named, given.complete))


def _inner(machine: Machine, node: ast.AST, value: Value, depth: int, place: int) -> Value:
    """Return an argument of settings: an object of its own where it names one."""
    if isinstance(value, SequenceValue) and not value.open:
        parts = (_inner(machine, node, one, depth, place * 100 + number) for number, one in enumerate(value.values))
        return SequenceValue(tuple(parts))
    if not isinstance(value, DictValue) or not any(key == TARGET for key, _ in value.entries):
        return value
    machine.phases.append(place + 1)  # objects that one line makes are told apart by it
    try:
        return _made(machine, node, value, Arguments(), depth + 1)
    finally:
        machine.phases.pop()


def _named(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return the class or function that ``get_class`` and the like give for a name."""
    name = constant(given.positional[0]) if given.positional else ...
    return named_value(machine, name) if isinstance(name, str) else OPAQUE


def _same(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    return given.positional[0] if given.positional else OPAQUE


CALLS: dict[str, Handler] = {
    **dict.fromkeys(("hydra.utils.instantiate", "hydra.utils.call"), instantiate),
    **dict.fromkeys((f"hydra.utils.get_{kind}" for kind in ("class", "method", "object", "static_method")), _named),
    "hydra.compose": composed,
    **dict.fromkeys(("omegaconf.OmegaConf.to_container", "omegaconf.OmegaConf.create"), _same),
}
