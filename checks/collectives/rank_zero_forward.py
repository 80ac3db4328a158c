"""One rank alone runs the DDP model, whose forward communicates.

What it finds
    A forward through the DDP module of a model with buffers (BatchNorm's statistics, for instance) that only some ranks
    run. An error when it records gradients, a warning under `no_grad`. In a run also a forward without gradients of a
    sharded model (FSDP) that meets another one's training.

Why it is bad
    Such a forward broadcasts the buffers from rank 0, and the other ranks do not take part: it hangs. Under `no_grad`
    it works by luck: DDP broadcasts in the first forward after a training step only, so rank 0's broadcast in
    validation is paired with the others' next one in training. A collective in between breaks that. The forward of a
    sharded model gathers its parameters from all ranks, so the others' training gets out of step with it at once.

Example
    if rank == 0:
        model.eval()
        with torch.no_grad():
            validate(model)             # model is the DDP module

Remedy
    Validate with model.module on that rank (it holds the same weights and does not communicate), or on all ranks. A
    sharded model can be validated on all ranks only.

When it is wrong
    Under `no_grad`, if only training steps follow.

References
    https://github.com/pytorch/pytorch/issues/54059
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.check import Check, RunRecord, Script
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.source.events import Event, Guard
from ddpdoctor.source.interpreter.values import ALL_RANKS
from ddpdoctor.source.libraries.sharding import FORWARD as SHARDED_FORWARD
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.divergence import finding_of, partings_by
from ddpdoctor.source.ranks.ranks import ranks_text
from ddpdoctor.source.torch_model.buffers import has_buffers
from ddpdoctor.source.torch_model.ddp import synchronises_buffers

CHECK = Check(
    code="DDP303",
    name="rank-zero-forward",
    stands_for="lone-forward",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=frozenset({"ranks", "collectives", "forwards"}),
    subjects=("wrap", "model"),
    triggers=("DataParallel", "ccelerat", "Fabric", "auto_model", "fully_shard", "parallelize_module"),
)
_REMEDY_SHARDED = "Let every rank run the forward of the sharded model: each holds a part of its parameters."
_REMEDY = (
    "Call model.module instead of the DDP module where only some ranks validate, or let every rank run the forward."
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report forwards of a sharded model, or of a DDP model with buffers, that a rank test keeps from some ranks."""
    projection = whole_projection(script)
    for parting in partings_by(projection, "forward"):
        yield finding_of(CHECK, parting, _REMEDY_SHARDED if parting.collective == SHARDED_FORWARD else _REMEDY)
    for forward, guard in lone_forwards(projection):
        yield CHECK.finding(
            f"this forward of a DDP model with buffers is run by {ranks_text(forward.ranks)} only: without gradients "
            "it works only as long as its buffer broadcast is paired with the next one of training",
            remedy=_REMEDY,
            locations=(forward.location, None if guard is None else guard.location),
            because=("this forward broadcasts the buffers when a training step came before", forward),
            severity=Severity.WARNING,
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the divergence of the run when a lone forward caused it, or the broadcasts that met others by luck."""
    from ddpdoctor.diagnosis.divergence import describe
    from ddpdoctor.diagnosis.divergence.divergence import find_divergence
    from ddpdoctor.diagnosis.divergence_kind import divergence_of, lone_turns
    from ddpdoctor.diagnosis.training.lone_forwards import lucky_broadcasts

    basis = record.job.kind
    divergence = divergence_of(record, CHECK.stands_for)
    if divergence is not None:
        lone = lone_turns(divergence, record)
        yield CHECK.finding(
            describe.lone_forward(divergence, lone),
            basis=basis,
            remedy=_REMEDY if record.wraps else _REMEDY_SHARDED,
            locations=describe.locations(divergence),
            ranks=tuple(turn.rank for turn in lone),
            evidence=describe.facts(divergence, basis),
        )
    elif find_divergence(record) is None:
        yield from CHECK.judged(basis, lucky_broadcasts(record), _REMEDY)


def lone_forwards(projection: Projection) -> Iterator[tuple[Event, Guard | None]]:
    """Such forwards of models that certainly hold buffers, in a script that also trains the model.

    Each with the rank test around it; without one where the others left before.
    """
    machine = projection.machine
    trained = any(event.receiver is not None for event in projection.of_kind("backward"))
    forwards = [event for event in projection.of_kind("ddp-forward") if not event.gradients]
    seen: set[ast.AST] = set()
    """Forwards, or the rank tests around them: what one test keeps from ranks has one cause."""
    for event in forwards:
        made = machine.object(event.receiver) if event.receiver is not None else None
        module = made.argument("module", 0) if made is not None else None
        if not trained or made is None or module is None or event.ranks == ALL_RANKS or event.node in seen:
            continue
        if (
            _matched(event, forwards)
            or _may_unwrap(event)
            or not synchronises_buffers(made)
            or not has_buffers(machine, module)
        ):
            continue
        guard = next((guard for guard in reversed(event.guards) if guard.arm != ALL_RANKS), None)
        cause = guard.node if guard is not None else event.node
        if cause in seen:
            continue
        seen |= {event.node, cause}
        yield event, guard


def _may_unwrap(event: Event) -> bool:
    """Return whether the script takes ``model.module`` here under a condition that is not known: where it wrapped."""
    called = getattr(event.node, "func", None)
    called = called.value if isinstance(called, ast.Attribute) and called.attr == "forward" else called
    options: list[ast.AST] = [called] if called is not None else []
    if isinstance(called, ast.Name):
        around = event.module.body_around(event.node)
        options += [one.value for one in event.module.assigning(around, called.id)]
    for module, test in event.undecided:
        around = module.parents.get(test, test)
        arms = (around.body, around.orelse) if isinstance(around, ast.If) else ()
        here = [any(event.node in ast.walk(one) for one in arm) for arm in arms]
        options += [one for arm, inside in zip(arms, here, strict=True) if any(here) and not inside for one in arm]
    return any(isinstance(node, ast.Attribute) and node.attr == "module" for one in options for node in ast.walk(one))


def _matched(event: Event, forwards: list[Event]) -> bool:
    """Return whether the other ranks run a forward too: the same line by another way, or the test's other arm."""
    for other in forwards:
        if other is event or not other.ranks & ~event.ranks:
            continue
        same_test = bool(event.guards and other.guards) and event.guards[-1].node is other.guards[-1].node
        if other.node is event.node or same_test:
            return True
    return False
