"""The training forward bypasses DistributedDataParallel.

What it finds
    A backward whose loss comes from `model.module(...)`, from a method of the wrapped model, or from the model as it
    was before the wrap, and from no forward through the DDP object. A DDP object of a part of the model that no line
    reads again, or reads but for its parameters, its mode or its state: the forward goes through the model that holds
    the part. In a run: gradients that differ between ranks when the optimizer uses them, after a backward that no
    forward through the DDP object led to.

Why it is bad
    DDP prepares its reduction in its own forward. Without one the gradients of this backward stay on their rank: the
    ranks train models that drift apart. Nothing hangs and nothing fails.

Example
    model = DistributedDataParallel(net)
    loss = model.module(batch)              # or net(batch), or model.module.compute_loss(batch)
    loss.backward()

Remedy
    Call the wrapper: loss = model(batch). Where the loss needs another method, let forward call it, selected by an
    argument.

When it is wrong
    Where the gradients are averaged by hand in a way that was not recognised. model.module is right for state_dict,
    for attributes and under torch.no_grad().

References
    https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.check import AVERAGING, Check, RunRecord, Script, Verdict
from ddpdoctor.checks.gradients.missing_ddp_wrap import bypassing_forwards
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import BoundMethod, SequenceValue
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.wrapped_models import (
    PARAMETERS,
    averages_by_hand,
    ddp_objects,
    holders,
    numbers_of,
    optimizers,
    training_events,
)
from ddpdoctor.source.script.module import descend
from ddpdoctor.source.torch_model.buffers import parts_of_module

CHECK = Check(
    code="DDP207",
    name="forward-bypasses-ddp",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=AVERAGING,
    subjects=("wrap", "loss"),
    triggers=("DistributedDataParallel", "ccelerat", "Fabric", "auto_model"),
)
_REMEDY_DROPPED = (
    "Wrap the model whose forward the training runs, with this part in it, and call the object that the wrap returns."
)
_KEEPING = PARAMETERS | {"train", "eval", "zero_grad", "requires_grad_", "state_dict", "load_state_dict"}
_REMEDY = "Call the DDP object itself; if another method than forward is needed, call it from forward."


def in_source(script: Script) -> Iterator[Finding]:
    """Report training forwards of a wrapped model that do not go through its wrapper."""
    projection = whole_projection(script)
    past = list(CHECK.suspected(bypassing_forwards(projection), _REMEDY))
    yield from past or CHECK.suspected(_dropped_wrappers(projection), _REMEDY_DROPPED)


def _dropped_wrappers(projection: Projection) -> Iterator[Verdict]:
    """Yield the wraps whose result no line can reach afterwards, in a job that trains what they wrap.

    As where a part of a model is wrapped to be trained, and the forward goes through the model that holds it.
    """
    steps = any(training_events(projection, "step"))
    backward = next(projection.in_course("backward"), None)
    if not steps or backward is None or averages_by_hand(projection.machine.script):
        return
    wraps = {event.ordinal: event for event in projection.of_kind("wrap")}
    called = {
        number
        for event in projection.in_course("ddp-forward")
        if event.gradients
        for number in ddp_objects(event.receiver)
    }
    others = [wraps[number] for number in called if number in wraps]
    held = [holder for optimizer in optimizers(projection) for holder in holders(projection, optimizer)]
    stepped = frozenset[int]().union(*map(numbers_of, held))
    for wrap in projection.in_course("wrap"):
        sources = _sources(projection, wrap)
        trained = not stepped.isdisjoint({wrap.ordinal, *numbers_of(wrap.argument("module", 0))})
        name = _dropped_name(projection, wrap, _KEEPING if trained else frozenset())
        if name is None or not all(
            wrap.module.in_other_arms(wrap.node, other.node) or (trained and _is_separate(projection, other, sources))
            for other in others
        ):
            continue
        yield Verdict(
            sentence="the DDP object that is made here is never called, so the gradients of what it wraps are not "
            "averaged",
            locations=wrap.location,
            because=(
                (f"nothing calls `{name}` after this line", wrap.location),
                ("the training's backward is here", backward),
            ),
        )


def _sources(projection: Projection, wrap: Event) -> frozenset[int]:
    """Return the numbers of what a DDP object wraps, and of the objects from whose attributes that is made."""
    machine = projection.machine
    found = numbers_of(wrap.argument("module", 0))
    made = [machine.events[number] for number in found if number in machine.events]
    for value in (value for event in made if event.kind == "object" for value in event.values):
        while isinstance(value, BoundMethod):
            value = value.receiver
        found |= numbers_of(value)
    return found


def _is_separate(projection: Projection, other: Event, sources: frozenset[int]) -> bool:
    """Return whether another DDP object certainly does not hold what is wrapped."""
    module = other.argument("module", 0)
    if module is None or not sources or not numbers_of(module):
        return False
    return all(numbers_of(part).isdisjoint(sources) for part in parts_of_module(projection.machine, module))


def _dropped_name(projection: Projection, wrap: Event, keeping: frozenset[str]) -> str | None:
    """Return the only name that holds a DDP object, where no line behind it reads that, but for methods that run no
    forward; None for any other object.
    """
    module = wrap.module
    statement = module.parents.get(wrap.node)
    while isinstance(statement, (ast.Tuple, ast.List)):
        statement = module.parents.get(statement)
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or wrap.loops:
        return None
    target = statement.targets[0]
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    held = [one.id for one in names if isinstance(one, ast.Name) and _holds(projection, wrap, one.id)]
    scope = module.body_around(statement)
    if len(held) != 1 or (isinstance(scope, ast.Module) and module is not projection.machine.script.modules[0]):
        return None
    inside = set(descend(statement))
    for node in descend(scope):
        if isinstance(node, ast.Name) and node.id in (held[0], "locals", "globals", "vars", "eval", "exec"):
            later = node.lineno > statement.lineno or not isinstance(scope, ast.FunctionDef)
            asked = module.parents.get(node)
            kept = isinstance(asked, ast.Attribute) and asked.attr in keeping
            kept |= node.id == "vars" and isinstance(asked, ast.Call) and bool(asked.args)  # Those of another object.
            if node not in inside and later and isinstance(node.ctx, ast.Load) and not kept:
                return None
        elif isinstance(node, (ast.Global, ast.Nonlocal)) and held[0] in node.names:
            return None
    return held[0]


def _holds(projection: Projection, wrap: Event, name: str) -> bool:
    value = projection.machine.store.get(wrap.scopes[-1], name) if wrap.scopes else None
    parts = value.values if isinstance(value, SequenceValue) else (value,)
    return any(wrap.ordinal in ddp_objects(part) for part in parts)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report backwards past the wrapper whose gradients differ between the ranks when they are used."""
    from ddpdoctor.diagnosis.training.replicas import unaveraged

    for found in unaveraged(record):
        if found.why == "bypass":
            title = (
                f"the forward of this backward bypasses DistributedDataParallel: the gradients of {found.model} are "
                f"not averaged, and differ between ranks in {found.shown}"
            )
            yield from CHECK.judged(record.job.kind, (found.verdict(title, _REMEDY),))
