"""What a script asks of the kind of an object: ``isinstance(model, DDP)``, ``type(model) is DDP``, ``hasattr``.

Scripts ask so whether a model is wrapped, inline or in a helper, and take ``model.module`` where it is.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from functools import partial

from ddpdoctor.source.interpreter.attributes import base_names, bases_of, class_attribute, lacks
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    Const,
    External,
    ExternalObject,
    Instance,
    OneOf,
    ProjectClass,
    SequenceValue,
    Value,
    by_rank,
    constant,
    derived,
    options_of,
)
from ddpdoctor.source.torch_model.library_calls import Named
from ddpdoctor.source.vocabulary import DATA_PARALLEL, DDP, MODULE

_WRAPPERS = frozenset({DDP, DATA_PARALLEL})
_MODULE = "torch.nn.Module"


def is_instance(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """Return what ``isinstance`` gives, where the class of the object shows it."""
    if len(positional) != 2:
        return derived(positional[:1])
    return by_rank(partial(_all_alike, machine), *positional)


def has_attribute(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """Return what ``hasattr`` gives, where the class of the object shows it."""
    name = constant(positional[1]) if len(positional) == 2 else None
    if not isinstance(name, str):
        return derived(positional[:1])
    return by_rank(lambda value: _of_options(value, lambda option: _has(machine, option, name)), positional[0])


def type_of(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """Return the class of an object."""
    return by_rank(_class_of, positional[0]) if len(positional) == 1 else derived([*positional, *named.values()])


def _class_of(value: Value) -> Value:
    if isinstance(value, ExternalObject):
        return External(value.name)
    if isinstance(value, Instance):
        return value.cls
    if isinstance(value, OneOf):
        classes = tuple(dict.fromkeys(map(_class_of, value.options)))
        return classes[0] if len(classes) == 1 else OneOf(classes, value.varying)
    return derived((value,))


def _all_alike(machine: Machine, value: Value, classes: Value) -> Value:
    wanted = classes.values if isinstance(classes, SequenceValue) and not classes.open else (classes,)
    return _of_options(value, lambda option: _any(_is_one(machine, option, cls) for cls in wanted))


def _of_options(value: Value, answer: Callable[[Value], bool | None]) -> Value:
    """Return what holds of each alternative that a value has; unknown where they differ."""
    answers = {answer(option) for option in options_of(value)}
    known = answers.pop() if len(answers) == 1 else None
    return derived((value,)) if known is None else Const(known)


def _any(answers: Iterable[bool | None]) -> bool | None:
    known = list(answers)
    return True if True in known else None if None in known else False


def _is_one(machine: Machine, option: Value, cls: Value) -> bool | None:
    if isinstance(option, Instance):
        return _derives(machine, option.cls, cls)
    if not isinstance(option, ExternalObject) or not isinstance(cls, External):
        return False if option == Const(None) and isinstance(cls, (External, ProjectClass)) else None
    if option.name == cls.name:
        return True
    if cls.name == _MODULE and (option.name in _WRAPPERS or MODULE.search(option.name)):
        return True
    # A wrapper is no other wrapper, and a plain module is none.
    plain = option.name in _WRAPPERS or MODULE.search(option.name) is not None
    return False if cls.name in _WRAPPERS and plain else None


def _derives(machine: Machine, own: ProjectClass, cls: Value) -> bool | None:
    if own == cls:
        return True
    bases = list(bases_of(machine, own))
    if cls in bases or (isinstance(cls, External) and cls.name in base_names(machine, own)):
        return True
    if isinstance(cls, ProjectClass):
        return False if all(isinstance(base, ProjectClass) for base in bases) else None
    read = all(isinstance(base, ProjectClass) or base == External(_MODULE) for base in bases)
    return False if isinstance(cls, External) and cls.name in _WRAPPERS and read else None


def _has(machine: Machine, option: Value, name: str) -> bool | None:
    if isinstance(option, ExternalObject):
        if machine.store.get(option.number, name) is not None:
            return True
        if name != "module":
            return None
        return True if option.name in _WRAPPERS else False if MODULE.search(option.name) else None
    if isinstance(option, Instance):
        if machine.store.get(option.number, name) is not None or class_attribute(machine, option.cls, name) is not None:
            return True
        plain_module = name == "module" and set(base_names(machine, option.cls)) == {_MODULE}
        return False if plain_module or lacks(machine, option, name) else None
    return False if option == Const(None) else None
