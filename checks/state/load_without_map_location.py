"""Every rank loads the checkpoint of GPU 0 onto GPU 0.

What it finds
    torch.load without map_location, or with one GPU for all ranks of a machine, on several ranks and from one path, of
    what is a checkpoint by its name, by its path or by the load_state_dict that it goes into, or a model by what is
    done with it, in a job with GPUs.

Why it is bad
    torch.save remembers the device of each tensor, and torch.load puts it back there. What rank 0 saved from GPU 0 is
    loaded by all ranks onto GPU 0: it briefly holds as many copies as the node has ranks and runs out of memory, and
    each process keeps a CUDA context there for the rest of the job.

Example
    model.load_state_dict(torch.load("checkpoint.pt"))

Remedy
    torch.load(path, map_location="cpu"), or map_location=f"cuda:{local_rank}".

When it is wrong
    Where the checkpoint holds CPU tensors only.

References
    https://docs.pytorch.org/docs/stable/generated/torch.load.html
    https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html#save-and-load-checkpoints
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from ddpdoctor.check import Check, Reason, Script, Via
from ddpdoctor.files import regex
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.fix import Fix, fix_of, node_at, with_keyword
from ddpdoctor.source.events import LONGEST_CONDITION, Event
from ddpdoctor.source.interpreter.values import (
    NONE,
    UNIFORM,
    Value,
    constant,
    is_guessed,
    is_varying,
    only_of_files,
    options_of,
)
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.files import is_one_path
from ddpdoctor.source.queries.job_kind import hints_at_ranks, is_distributed, is_one_gpu, may_use_cuda, noted
from ddpdoctor.source.queries.wrapped_models import has_no_tensors
from ddpdoctor.source.ranks.ranks import FIRST_RANKS
from ddpdoctor.source.script.module import Module, Scope, descend, last_name, made_from
from ddpdoctor.source.script.script import uses_part
from ddpdoctor.source.torch_model.recorded_calls import SET_VARIABLE
from ddpdoctor.source.vocabulary import DDP, MODEL_PRESERVING, text_hints_at_ranks

CHECK = Check(
    code="DDP602",
    name="load-without-map-location",
    stands_for="missing-device",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"ranks", "files", "checkpoint_loads"}),
    subjects=("job",),
    triggers=("load",),
)

REMEDY = 'Give it map_location="cpu", or the rank\'s own device.'


def in_source(script: Script) -> Iterator[Finding]:
    """Report loads of a checkpoint on all ranks that name no device."""
    for load in unmapped_loads(whole_projection(script)):
        location = load.location
        is_mapped = constant(load.argument("map_location", 1) or NONE) is not None
        onto, given = ("one GPU", "the same, too") if is_mapped else ("the GPU from which it was saved", "not given")
        yield CHECK.finding(
            f"every rank loads this checkpoint onto {onto}",
            remedy=REMEDY,
            locations=location,
            severity=Severity.ADVICE if is_published(load) else None,
            because=(f"the path is the same on every rank, and map_location is {given}", Via(location, load.chain)),
        )


in_run = CHECK.judged_by("diagnosis.files", "judge_map_locations", REMEDY)


# The fix of a checkpoint that is loaded onto the GPU from which it was saved.


def fixes(script: Script, finding: Finding) -> Iterator[Fix]:
    """Give the load ``map_location="cpu"``.

    It is safe where all that is loaded goes into ``load_state_dict``, which copies it to where it belongs, or is looked
    up by a key; tensors that are used as they are would be on another device than before.
    """
    found = node_at(script, finding, ast.Call)
    if found is not None:
        edit = with_keyword(*found, "map_location", '"cpu"')
        yield from fix_of(finding, 'load with map_location="cpu"', edit, safe=_goes_into_state(*found))


def _goes_into_state(module: Module, node: ast.expr) -> bool:
    around = module.parents.get(node)
    if isinstance(around, ast.Assign) and len(around.targets) == 1 and isinstance(around.targets[0], ast.Name):
        return _is_only_looked_into(module, around, around.targets[0].id)
    while isinstance(around, (ast.Subscript, ast.Attribute)):
        around = module.parents.get(around)
    return _is_load(around)


def _is_only_looked_into(module: Module, assignment: ast.Assign, name: str) -> bool:
    scope = next((inner for inner in module.ancestors(assignment) if isinstance(inner, Scope)), module.tree)
    uses = [
        node
        for node in ast.walk(scope)
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
    ]
    into_state = [use for use in uses if any(_is_load(around) for around in module.ancestors(use))]
    by_key = [use for use in uses if isinstance(module.parents.get(use), (ast.Subscript, ast.Compare))]
    return bool(into_state) and set(uses) == {*into_state, *by_key}


def _is_load(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load_state_dict"


# Checkpoints that ranks load, and onto which device.

_CHECKPOINT = regex(r"check_?point|ckpt|resume|snapshot|state_?dict|weights|pretrained", re.IGNORECASE)
_STATE = regex(r"state|model|net|weight|param|optim|sched|scaler|ema|module|encoder|decoder|epoch|step|iter", re.I)
"""In a key of a checkpoint."""
_PUBLISHED = regex(r"pre_?train\w*/|\.cache/|hub/checkpoints/|[-_]f?[0-9a-f]{8,}\.(pth?|pyth|bin)$", re.IGNORECASE)
"""In a path: a directory of published weights, or a file with its digest in its name, as torch.hub's have it."""
_SHARDED_STATE = ("set_default_device", "FSDP", "fully_shard")
_TO_CPU = regex(r"\.cpu\(\)|\.to\(\s*(device=)?(torch\.device\()?['\"]cpu")


def unmapped_loads(projection: Projection) -> Iterator[Event]:
    """Loads of a checkpoint on several ranks, from one path, onto the GPU of the save or any other one."""
    script = projection.machine.script
    if not is_distributed(projection) or not may_use_cuda(script):
        return
    if any(map(_leaves_an_own_gpu, projection.in_course("call"))):
        return  # What was saved from its first GPU comes back to that, which is another one on each rank.
    if uses_part(script, _SHARDED_STATE) or any(map(_saves_on_cpu, projection.in_course("save"))):
        return
    seen = set(_loads_of_numbers(projection))
    for event in noted(projection, "torch.load", "torch.jit.load"):
        if event.node in seen or not is_read_by_several(event) or not event.complete or _is_mapped_otherwise(event):
            continue
        if event.ranks in FIRST_RANKS:
            continue  # The first rank of each node has the GPU from which the first one saved.
        place = event.argument("map_location", 1) or NONE
        if (constant(place) is None or is_one_gpu(projection, event, place)) and _is_checkpoint(event):
            seen.add(event.node)
            yield event


def _leaves_an_own_gpu(event: Event) -> bool:
    name = constant(event.positional[0]) if event.name == SET_VARIABLE else ""
    value = event.positional[1] if name == "CUDA_VISIBLE_DEVICES" and not event.in_parent else NONE
    return is_varying(value) and not is_guessed(value)


def _loads_of_numbers(projection: Projection) -> Iterator[ast.AST]:
    """Yield what is given as it is to ``load_state_dict`` of a scheduler or a scaler, whose state is on no device."""
    for event in noted(projection, "load_state_dict"):
        options = options_of(event.receiver) if event.receiver is not None else ()
        if options and all(map(has_no_tensors, options)) and isinstance(event.node, ast.Call):
            yield from event.node.args


def is_published(load: Event) -> bool:
    """Return whether pretrained weights of a fixed name are loaded: those that people publish are mostly the CPU's."""
    path = constant(load.argument("f", 0) or NONE)
    told = (str(path), *load.conditions)
    if isinstance(path, str) and any("pretrain" in text for text in told):
        return True
    return any(
        _PUBLISHED.search(text) is not None
        for part in made_from(load.node, load.module.body_around(load.node))
        for text in _paths_in(part)
    )


def _paths_in(node: ast.AST) -> Iterator[str]:
    """Yield a text, or the directories that ``os.path.join`` is given, each with its slash."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Call) and last_name(node.func) == "join":
        parts = (part.value for part in node.args[:-1] if isinstance(part, ast.Constant))
        yield from (f"{part}/" for part in parts if isinstance(part, str))


def _saves_on_cpu(save: Event) -> bool:
    """Return whether what is saved was moved to the CPU before, in the call or where its variables are assigned."""
    body = save.module.body_around(save.node)
    made = list(made_from(save.node, body))
    names = {node.id for node in (*made, *descend(save.node)) if isinstance(node, ast.Name)}
    moved = (node for node in made if isinstance(node, (ast.Call, ast.DictComp)))
    # Entry by entry: `for key, value in state.items(): state[key] = value.cpu()`.
    entries = (
        one.value
        for loop in save.module.index.within(body, ast.For)
        for one in save.module.index.within(loop, ast.Assign)
        for target in one.targets
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name) and target.value.id in names
        if target.value.id in {node.id for node in descend(loop.iter) if isinstance(node, ast.Name)}
    )
    return any(_TO_CPU.search(ast.unparse(node)) is not None for node in (*moved, *entries))


def _is_mapped_otherwise(event: Event) -> bool:
    """Return whether the other arm of an undecided condition loads the same onto a device.

    The script then knows about devices, and this arm is for a process without one of its own: ``if gpu is None``. An
    arm that loads onto the CPU is for machines without GPUs.
    """
    module = event.module
    for test in (test for owner, test in event.undecided if owner is module):
        around = module.parents.get(test)
        if not isinstance(around, ast.If) or not isinstance(event.node, ast.Call) or not event.node.args:
            continue
        path = ast.unparse(event.node.args[0])
        arms = [node for statement in (*around.body, *around.orelse) for node in descend(statement)]
        bound = {node.id for node in arms if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        if any(isinstance(node, ast.Name) and node.id in bound for node in descend(event.node.args[0])):
            continue  # Each arm opens a file of its own under that name.
        for call in arms:
            if isinstance(call, ast.Call) and call.args and call is not event.node:
                mapped = any(
                    entry.arg == "map_location" and not _is_cpu(module, entry.value) for entry in call.keywords
                )
                if mapped and module.resolve(call.func) == "torch.load" and ast.unparse(call.args[0]) == path:
                    return True
    return False


def _is_cpu(module: Module, device: ast.expr) -> bool:
    """Return whether an expression names the CPU: ``"cpu"``, ``torch.device("cpu")``."""
    if isinstance(device, ast.Call) and module.resolve(device.func) == "torch.device" and device.args:
        device = device.args[0]
    return isinstance(device, ast.Constant) and device.value == "cpu"


def is_read_by_several(event: Event) -> bool:
    """Return whether several ranks load from one path, with no hint of a rank test around it.

    The newest of what a directory holds is one for all of them, too: ranks mostly share their files.
    """
    path = event.argument("f", 0)
    if path is not None and all(map(only_of_files, options_of(path))):
        parts = made_from(event.node, event.module.body_around(event.node))
        if not any(text_hints_at_ranks(event.module.excerpt(part, LONGEST_CONDITION)) for part in parts):
            path = UNIFORM
    return may_be_one_path(event, path)


def may_be_one_path(event: Event, path: Value | None) -> bool:
    """Return whether several ranks do something with a path that is the same for them."""
    several = event.ranks & (event.ranks - 1)
    if path is None or not several or event.in_parent or not is_one_path(path):
        return False
    return not hints_at_ranks(event)


def _is_checkpoint(event: Event) -> bool:
    """Return whether what is loaded is a model's state rather than data, by its use, its name or its path."""
    call, module = event.node, event.module
    around = module.parents.get(_part_taken(module, call))
    named = isinstance(call, ast.Call) and bool(call.args) and _CHECKPOINT.search(ast.unparse(call.args[0])) is not None
    if isinstance(around, ast.Assign) and len(around.targets) == 1 and isinstance(around.targets[0], ast.Name):
        name = around.targets[0].id
        if _is_loaded_later(module, call, name) or _is_used_as_module(module, call, name):
            return True
        keys, is_all = _keys_asked(module, call, name)
        if "state_dict" in keys:
            return True
        holds_no_state = is_all and not any(map(_STATE.search, keys))
        return (named or _CHECKPOINT.search(name) is not None) and not holds_no_state
    return named or (isinstance(around, ast.Call) and getattr(around.func, "attr", "") == "load_state_dict")


def _part_taken(module: Module, load: ast.AST) -> ast.AST:
    """Return the part of what is loaded that is taken at once: ``torch.load(path)["model"]``, ``.get("model")``."""
    taken = load
    while True:
        around = module.parents.get(taken)
        if isinstance(around, ast.Subscript) and around.value is taken:
            taken = around
        elif isinstance(around, ast.Attribute) and around.attr in {"get", "pop"}:
            taken = module.parents[around]
        else:
            return taken


def _keys_asked(module: Module, call: ast.AST, name: str) -> tuple[list[str], bool]:
    """Return the keys by which a variable is asked for parts, and whether it is used for nothing else."""
    uses = [
        module.parents.get(node)
        for node in module.index.within(module.body_around(call), ast.Name)
        if node.id == name and isinstance(node.ctx, ast.Load)
    ]
    keys = [
        use.slice.value
        for use in uses
        if isinstance(use, ast.Subscript) and isinstance(use.slice, ast.Constant) and isinstance(use.slice.value, str)
    ]
    return keys, bool(keys) and len(keys) == len(uses)


def _is_loaded_later(module: Module, call: ast.AST, name: str) -> bool:
    function = next((node for node in module.ancestors(call) if isinstance(node, ast.FunctionDef)), module.tree)
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "load_state_dict"
        and any(isinstance(inner, ast.Name) and inner.id == name for entry in node.args for inner in descend(entry))
        for node in descend(function)
    )


_OF_MODULES = frozenset({"children", "eval", "modules", "named_parameters", "parameters", "train"})
"""Methods of a module that no tensor, table or dictionary has."""
_TAKE_MODULES = frozenset({DDP, *MODEL_PRESERVING})


def _is_used_as_module(module: Module, load: ast.AST, name: str) -> bool:
    """Return whether a variable is later asked for what modules have, or given to what takes a module."""
    for call in module.index.within(module.body_around(load), ast.Call):
        if call.lineno <= getattr(load, "lineno", 0):
            continue
        if isinstance(call.func, ast.Attribute) and call.func.attr in _OF_MODULES:
            if isinstance(call.func.value, ast.Name) and call.func.value.id == name:
                return True
        elif call.args and module.resolve(call.func) in _TAKE_MODULES:
            inside = (node.id for node in descend(call.args[0]) if isinstance(node, ast.Name))
            if name in inside:
                return True
    return False


# The callers by which a line in a function is come to, as evidence of what is said of the line.

MAXIMUM_CALLERS = 3


def callers(events: Sequence[Event], text: str) -> tuple[Reason, ...]:
    """Return a fact for each of the first events that is in a called function, with the chain of calls to it."""
    several = (event for event in events[:MAXIMUM_CALLERS] if len({frame.function for frame in event.chain}) > 1)
    return tuple((text, event) for event in several)
