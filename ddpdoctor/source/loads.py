"""Checkpoints that ranks load: onto which device, when, and into which module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import msgspec

from ddpdoctor.source.job import framework, may_use_cuda, noted
from ddpdoctor.source.module import Module, descend
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.saving import is_distributed, is_one_path
from ddpdoctor.source.trace import Event
from ddpdoctor.source.values import ALL_LANES, NONE, Built, Value, constant
from ddpdoctor.source.vocabulary import DDP, speaks_of_ranks
from ddpdoctor.source.words import mentions_any

_CHECKPOINT = re.compile(r"check_?point|ckpt|resume|snapshot|state_?dict|weights|pretrained", re.IGNORECASE)
_WAITS = re.compile(r"barrier|synchron|wait_for|wait_all|sync_proc", re.IGNORECASE)
_HANDLE_PREFIX = ('"module.', "'module.", "consume_prefix", "strip_prefix")
_SAVED_ON_CPU = (".cpu()", "cpu_state", "set_default_device", "FSDP", "fully_shard")


class EarlyLoad(msgspec.Struct, frozen=True, eq=False):
    """A load of a file that one rank has just begun to write."""

    load: Event
    save: Event
    path: str
    """Source of the path."""


class PrefixMismatch(msgspec.Struct, frozen=True, eq=False):
    """A state dict of the DDP wrapper that a bare module is to load, or the reverse."""

    load: Event
    save: Event
    wrapped_save: bool


def unmapped_loads(projection: Projection) -> Iterator[Event]:
    """Loads of a checkpoint on several ranks, from one path, without ``map_location``, in a job with GPUs."""
    script = projection.machine.script
    if not is_distributed(projection) or not may_use_cuda(script) or framework(script):
        return
    if mentions_any(script, _SAVED_ON_CPU):
        return
    seen: set[ast.AST] = set()
    for event in noted(projection, "torch.load"):
        if event.node in seen or not _is_shared(event) or not event.complete:
            continue
        if constant(event.argument("map_location", 1) or NONE) is None and _is_checkpoint(event):
            seen.add(event.node)
            yield event


def _is_shared(event: Event) -> bool:
    path = event.argument("f", 0)
    several = event.ranks & (event.ranks - 1)
    if path is None or not several or event.in_parent or not is_one_path(path):
        return False
    return not any(speaks_of_ranks(condition) for condition in event.conditions)


def _is_checkpoint(event: Event) -> bool:
    """Whether what is loaded is a model's state rather than data, by its use, its name or its path."""
    call, module = event.node, event.module
    if isinstance(call, ast.Call) and call.args and _CHECKPOINT.search(ast.unparse(call.args[0])):
        return True
    around = module.parents.get(call)
    if isinstance(around, ast.Call) and getattr(around.func, "attr", "") == "load_state_dict":
        return True
    if isinstance(around, ast.Assign) and len(around.targets) == 1 and isinstance(around.targets[0], ast.Name):
        name = around.targets[0].id
        return _CHECKPOINT.search(name) is not None or _is_loaded_later(module, call, name)
    return False


def _is_loaded_later(module: Module, call: ast.AST, name: str) -> bool:
    function = next((node for node in module.ancestors(call) if isinstance(node, ast.FunctionDef)), module.tree)
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "load_state_dict"
        and any(isinstance(inner, ast.Name) and inner.id == name for entry in node.args for inner in descend(entry))
        for node in descend(function)
    )


def early_loads(projection: Projection) -> Iterator[EarlyLoad]:
    """Loads on ranks that do not wait for the rank that saves the same path before."""
    if not is_distributed(projection) or framework(projection.machine.script):
        return
    saves = [event for event in projection.in_course("save") if not event.ranks & (event.ranks - 1)]
    if not saves or not any(noted(projection, "torch.load")) or _waits_somewhere_unknown(projection):
        return
    waits = list(projection.in_course("collective", "wrap", "forward", "backward"))
    seen: set[ast.AST] = set()
    for load in noted(projection, "torch.load"):
        if load.node in seen or not _is_shared(load):
            continue
        for save in reversed(saves):
            if save.ordinal < load.ordinal and save.root == load.root and _same_path(save, load):
                if not any(_is_between(save, wait, load) for wait in waits):
                    seen.add(load.node)
                    yield EarlyLoad(load, save, _source(load, "f", 0))
                break


def _same_path(save: Event, load: Event) -> bool:
    one, other = save.argument("f", 1), load.argument("f", 0)
    if one is None or other is None:
        return False
    if isinstance(constant(one), str) or isinstance(constant(other), str):
        return constant(one) == constant(other)
    return one == other and save.scopes == load.scopes and _source(save, "f", 1) == _source(load, "f", 0)


def _is_between(save: Event, wait: Event, load: Event) -> bool:
    return save.ordinal < wait.ordinal < load.ordinal and wait.ranks == ALL_LANES


def _waits_somewhere_unknown(projection: Projection) -> bool:
    """Whether something is called by a name that promises to wait, and was not seen to be a collective."""
    known = {event.node for event in projection.events if event.kind == "collective"}
    for module in projection.machine.script.modules:
        for node in module.nodes:
            if isinstance(node, ast.Call) and node not in known and not module.resolve(node.func).startswith("torch."):
                last = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if _WAITS.search(last) and not _is_project_function(projection, last):
                    return True
    return False


def _is_project_function(projection: Projection, name: str) -> bool:
    return name in projection.machine.mentions.synchronising


def prefix_mismatches(projection: Projection) -> Iterator[PrefixMismatch]:
    """Saves and loads of one path of which one goes through the DDP wrapper and the other does not."""
    script = projection.machine.script
    if not any(noted(projection, "load_state_dict")) or mentions_any(script, _HANDLE_PREFIX):
        return
    states = {event.node: event.receiver for event in noted(projection, "state_dict")}
    saves = [(event, _saved_state(event, states)) for event in projection.in_course("save")]
    loads = {event.node: event for event in noted(projection, "torch.load")}
    seen: set[ast.AST] = set()
    for event in noted(projection, "load_state_dict"):
        load = _loaded(event, loads)
        target = _is_wrapper(event.receiver)
        if load is None or target is None or event.node in seen or "strict" in event.named:
            continue
        for save, wrapped in saves:
            one_path = _source(save, "f", 1) == _source(load, "f", 0)
            if wrapped is not None and wrapped != target and one_path:
                seen.add(event.node)
                yield PrefixMismatch(event, save, wrapped)
                break


def _saved_state(save: Event, states: dict[ast.AST, Value | None]) -> bool | None:
    """Whether what is saved is the state dict of the wrapper (True) or of a bare module (False)."""
    call = save.node
    saved = call.args[0] if isinstance(call, ast.Call) and call.args else None
    if isinstance(saved, ast.Call) and saved in states:
        return _is_wrapper(states[saved])
    return None


def _is_wrapper(value: Value | None) -> bool | None:
    if isinstance(value, Built):
        if value.name == DDP:
            return True
        return False if value.name.startswith("torch.nn.") else None
    return False if type(value).__name__ == "Instance" else None


def _loaded(event: Event, loads: dict[ast.AST, Event]) -> Event | None:
    call = event.node
    state = call.args[0] if isinstance(call, ast.Call) and call.args else None
    if isinstance(state, ast.Name):
        function = next((node for node in event.module.ancestors(call) if isinstance(node, ast.FunctionDef)), None)
        body = descend(function or event.module.tree)
        assigned = [
            node.value
            for node in body
            if isinstance(node, ast.Assign) and any(getattr(one, "id", "") == state.id for one in node.targets)
        ]
        state = assigned[0] if len(assigned) == 1 else None
    return loads.get(state) if state is not None else None


def _source(event: Event, name: str, position: int) -> str:
    call = event.node
    if not isinstance(call, ast.Call):
        return ""
    for entry in call.keywords:
        if entry.arg == name:
            return event.module.excerpt(entry.value, 60)
    return event.module.excerpt(call.args[position], 60) if position < len(call.args) else ""
