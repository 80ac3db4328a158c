"""The code that a restart lacks, in the names that the script has for its objects, its checkpoint and its keys."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ddpdoctor.finding import Location
from ddpdoctor.source.events import Event
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.wrapped_models import optimizers
from ddpdoctor.source.script.module import Module, descend, made_from
from ddpdoctor.source.script.script import Script

SCHEDULERS = "torch.optim.lr_scheduler."
_KINDS = {"optimizer": "optimizer", "scheduler": "learning-rate", "scaler": "scale"}
"""Of objects with a state, and what is otherwise after a restart that does not bring it back."""
STATEFUL = ("optim", "sched", "scaler")
"""Words of what has a state beside the weights."""
_STATE = "state_dict"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def own_code(script: Script, save: Location, load: Location) -> Mapping[str, tuple[str, str]]:
    """Return what belongs into the checkpoint that is saved at a line, and to the line that loads it, by what a restart
    does otherwise.

    Only what is certain is there: the checkpoint is put together in the function that saves it and has a name where it
    is loaded, the object is the only one of its kind, and its name is known where the checkpoint is loaded.
    """
    saving = next(_calls(script, "torch.save", save), None)
    loading = next(_calls(script, "torch.load", load), None)
    if saving is None or loading is None:
        return {}
    entries = dict(_entries(*saving))
    module, call = loading
    bound = module.parents.get(call)
    if not entries or not isinstance(bound, ast.Assign) or len(bound.targets) != 1:
        return {}
    held, found = ast.unparse(bound.targets[0]), dict[str, tuple[str, str]]()
    for key, value in entries.items():
        owner = owner_of_state(value)
        if owner is not None and not speaks_of(f"{key} {ast.unparse(owner)}", STATEFUL):
            if _is_known(module, call, owner):
                found["weights"] = ("", f'{ast.unparse(owner)}.load_{_STATE}({held}["{key}"])')
            break
    projection = whole_projection(script)
    for kind, what in _KINDS.items():
        name = _only(projection, kind)
        if name is None or not _is_known(module, call, name):
            continue
        text = ast.unparse(name)
        owners = ((key, owner_of_state(value)) for key, value in entries.items())
        key = next((key for key, owner in owners if owner is not None and ast.unparse(owner) == text), "")
        missing = "" if key else f'"{kind}": {text}.{_STATE}()'
        found[what] = (missing, f'{text}.load_{_STATE}({held}["{key or kind}"])')
    for key, value in entries.items():
        if "epoch" in key.lower() and isinstance(value, (ast.Name, ast.BinOp)):
            # What is saved as it is counts the epoch that was finished.
            more = " + 1" if isinstance(value, ast.Name) else ""
            found["data"] = ("", f'range({held}["{key}"]{more}, …)')
    return found


def _calls(script: Script, name: str, place: Location) -> Iterator[tuple[Module, ast.Call]]:
    for module in script.modules:
        if Path(module.path) == Path(place.file):
            for call in module.calls_by_name.get(name.rpartition(".")[2], ()):
                if call.lineno <= place.line <= (call.end_lineno or call.lineno) and module.resolve(call.func) == name:
                    yield module, call


def _entries(module: Module, save: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Yield keys and values of the checkpoint that is saved, where the function around puts it together."""
    if not save.args:
        return
    body = module.body_around(save)
    given = [save.args[0]] if isinstance(save.args[0], ast.Dict) else list(made_from(save.args[0], body))
    literals = [one for one in given if isinstance(one, ast.Dict)]
    if len(literals) == 1 and not any(isinstance(one, ast.Call) and literals[0] in descend(one) for one in given):
        for key, value in zip(literals[0].keys, literals[0].values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value, value


def owner_of_state(value: ast.expr) -> ast.expr | None:
    """Return whose ``state_dict`` an expression takes; None for any other."""
    called = value.func if isinstance(value, ast.Call) else None
    return called.value if isinstance(called, ast.Attribute) and called.attr == _STATE else None


def _only(projection: Projection, kind: str) -> ast.expr | None:
    """Return the name of the only object of a kind that the script makes."""
    objects = optimizers(projection) if kind == "optimizer" else projection.in_course("object")
    made: list[Event] = [one for one in objects if kind == "optimizer" or is_named(one.name, kind)]
    if len({one.node for one in made}) != 1:
        return None
    bound = made[0].module.parents.get(made[0].node)
    return bound.targets[0] if isinstance(bound, ast.Assign) and len(bound.targets) == 1 else None


def is_named(name: str, kind: str) -> bool:
    """Return whether a class is one of schedulers or of scalers."""
    return name.startswith(SCHEDULERS) if kind == "scheduler" else name.endswith(".GradScaler")


def _is_known(module: Module, place: ast.AST, name: ast.expr) -> bool:
    """Return whether a name means the same at a place: it is bound there, of the object itself, or of the module."""
    root: ast.AST = name
    while isinstance(root, ast.Attribute):
        root = root.value
    body = module.body_around(place)
    parameters = (
        {one.arg for one in descend(body) if isinstance(one, ast.arg)} if isinstance(body, _FUNCTIONS) else set()
    )
    if not isinstance(root, ast.Name):
        return False
    stored = (one for one in module.index.of(ast.Name) if one.id == root.id and isinstance(one.ctx, ast.Store))
    return root.id in parameters or any(module.body_around(one) in (body, module.tree) for one in stored)


def speaks_of(text: str, words: Iterable[str]) -> bool:
    """Return whether a text holds one of some words in small letters, however it is written itself."""
    return any(word in text.lower() for word in words)


def constant_text(node: ast.expr | None) -> str:
    """Return what a node is that is a string; empty for others."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def key_of(part: ast.AST) -> str:
    """Return the key that something is taken by."""
    if isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Load):
        return constant_text(part.slice)
    is_get = isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in ("get", "pop")
    return constant_text(part.args[0]) if isinstance(part, ast.Call) and is_get and part.args else ""
