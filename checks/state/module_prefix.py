"""A state dict of the DDP wrapper meets a bare model, or the reverse.

What it finds
    A save and a load of one path, or of one key of the dict that is saved there, of which one goes through the DDP
    wrapper and the other through the bare module.

Why it is bad
    Names in the wrapper's state dict begin with "module.". Loaded into a bare model they are missing and unexpected
    keys and the load fails; with strict=False nothing is loaded at all, without a message.

Example
    torch.save(ddp_model.state_dict(), path)
    fresh.load_state_dict(torch.load(path))

Remedy
    Save ddp_model.module.state_dict() and always load into the bare module.

When it is wrong
    Where the names are changed between the two outside of what was read.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from ddpdoctor.check import Check, Script, Verdict
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ExternalObject, Instance, Value
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.job_kind import noted
from ddpdoctor.source.script.module import Module, argument_of
from ddpdoctor.source.script.script import uses_part
from ddpdoctor.source.vocabulary import DDP

CHECK = Check(
    code="DDP604",
    name="module-prefix",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ADVICE),
    needs=frozenset({"ranks", "state_names"}),
    subjects=("wrap",),
    triggers=("load_state_dict",),
)

REMEDY = "Save and load through the bare module: ddp_model.module.state_dict()."


def in_source(script: Script) -> Iterator[Finding]:
    """Report loads whose names do not fit what was saved."""
    yield from CHECK.suspected(prefix_mismatches(whole_projection(script)), REMEDY)


in_run = CHECK.judged_by("diagnosis.files", "judge_prefixes", REMEDY)


_MOVES = ("os.replace", "os.rename", "shutil.move")
"""Give a file that is whole the name that it is loaded by."""
_HANDLE_PREFIX = ("module.", "consume_prefix", "strip_prefix")


def prefix_mismatches(projection: Projection) -> Iterator[Verdict]:
    """Saves and loads of one path, and one key of it, of which one goes through the DDP wrapper and the other not."""
    script = projection.machine.script
    if not any(noted(projection, "load_state_dict")) or uses_part(script, _HANDLE_PREFIX):
        return
    states = {event.node: event.receiver for event in noted(projection, "state_dict")}
    saves = list(projection.in_course("save"))
    if not saves:
        return
    loads = {event.node: event for event in noted(projection, "torch.load")}
    moves = list(noted(projection, *_MOVES))
    seen: set[ast.AST] = set()
    for event in noted(projection, "load_state_dict"):
        load, key = _loaded(event, loads)
        target = _is_wrapper(event.receiver)
        if load is None or target is None or event.node in seen or "strict" in event.named:
            continue
        path = _source(load, "f", 0)
        paths = {path, *(_source(move, "src", 0) for move in moves if _source(move, "dst", 1) == path)}
        for save in saves:
            wrapped = _saved_states(save, states) if _source(save, "f", 1) in paths else {}
            if key in wrapped and wrapped[key] is not target:
                seen.add(event.node)
                bare, wrapper = "a bare model", "the DDP wrapper"
                saved, loaded = (wrapper, bare) if wrapped[key] else (bare, wrapper)
                yield Verdict(
                    sentence=f'{loaded} loads what was saved from {saved}: the names differ by the prefix "module."',
                    locations=event.location,
                    because=("it was saved here", save.location),
                )
                break


def _saved_states(save: Event, states: Mapping[ast.AST, Value | None]) -> Mapping[str, bool]:
    """Return whether what is saved is the state dict of the wrapper (True) or of a bare module, by its key in a dict.

    The key of a state dict that is saved itself is empty; what cannot be told is left out.
    """
    call = save.node
    saved = call.args[0] if isinstance(call, ast.Call) and call.args else None
    if isinstance(saved, ast.Name):
        saved = _assigned(save.module, call, saved.id)
    parts: list[tuple[str, ast.expr]] = [("", saved)] if saved is not None else []
    if isinstance(saved, ast.Dict):
        parts = [(_text(key), value) for key, value in zip(saved.keys, saved.values, strict=True) if _text(key)]
    found = {key: _is_wrapper(states[part]) for key, part in parts if part in states}
    return {key: wrapped for key, wrapped in found.items() if wrapped is not None}


def _is_wrapper(value: Value | None) -> bool | None:
    if isinstance(value, ExternalObject):
        if value.name == DDP:
            return True
        return False if value.name.startswith("torch.nn.") else None
    return False if isinstance(value, Instance) else None


def _loaded(event: Event, loads: Mapping[ast.AST, Event]) -> tuple[Event | None, str]:
    """Return the load that a state dict comes from, and the key under which it stands there; empty for all of it."""
    call = event.node
    state = call.args[0] if isinstance(call, ast.Call) and call.args else None
    if isinstance(state, ast.Name):
        state = _assigned(event.module, call, state.id)
    key = ""
    if isinstance(state, ast.Subscript) and _text(state.slice):
        key, state = _text(state.slice), state.value
    if isinstance(state, ast.Name):
        state = _assigned(event.module, call, state.id)
    return (loads.get(state) if state is not None else None), key


def _text(node: ast.AST | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _assigned(module: Module, node: ast.AST, name: str) -> ast.expr | None:
    """Return the value of the only assignment to a name in the function around a node."""
    function = next((around for around in module.ancestors(node) if isinstance(around, ast.FunctionDef)), None)
    found = module.assigning(function or module.tree, name)
    return found[0].value if len(found) == 1 else None


def _source(event: Event, name: str, position: int) -> str:
    node = argument_of(event.node, name, position)
    return "" if node is None else event.module.excerpt(node, 60)
