"""Gradients are taken in a way that DDP's reduction does not see.

What it finds
    `torch.autograd.grad` for the parameters of a DDP model, and a second backward through one forward of it
    (`retain_graph=True`). In a run: such gradients that differ between ranks when the optimizer uses them; also
    those of the second of two backwards after two forwards, for DDP reduces once.

Why it is bad
    DDP averages what arrives in .grad during the first backward after its forward. autograd.grad returns gradients
    instead, and a second backward adds to .grad after the reduction is over: both stay different on every rank, and
    nothing says so.

Example
    loss = model(batch).mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))

Remedy
    Call loss.backward(), once for the sum of all losses of a forward; or all-reduce the gradients by hand.

When it is wrong
    If the result is only inspected. autograd.grad for inputs (gradient penalties) is not reported: it is right as
    long as the penalty is part of one loss that uses every parameter; a backward of the penalty alone leaves out the
    last bias, and DDP's reduction with it.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence

from ddpdoctor.check import AVERAGING, Check, RunRecord, Script, Verdict
from ddpdoctor.files import regex
from ddpdoctor.finding import Finding, Location, Refuted, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.scopes import SIZES
from ddpdoctor.source.interpreter.values import BUILTINS, NONE, ExternalObject, Value, options_of, tags_of
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.divergence import guard_of
from ddpdoctor.source.queries.job_kind import is_distributed
from ddpdoctor.source.queries.origins import NAMED, Origins
from ddpdoctor.source.queries.wrapped_models import (
    PARAMETERS,
    averages_by_hand,
    innermost_loop,
    is_training_state,
    loop_nodes,
    training_events,
    training_forwards,
    wrap_numbers,
)
from ddpdoctor.source.ranks.ranks import FIRST_RANKS
from ddpdoctor.source.script.module import Module, argument_of, descend, functions_named, last_name, made_from
from ddpdoctor.source.script.script import uses_part
from ddpdoctor.source.vocabulary import OPTIMIZER, text_hints_at_ranks

CHECK = Check(
    code="DDP220",
    name="autograd-grad-bypass",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=AVERAGING,
    subjects=("training",),
    triggers=("autograd", "retain_graph"),
)
_SAID = {
    "autograd-grad": (
        "torch.autograd.grad returns this rank's gradients of {}: DDP does not average them",
        "Use loss.backward(), or all-reduce the gradients by hand.",
    ),
    "again": (
        "the gradients of this further backward of {} are not averaged: DDP had reduced already",
        "Add the losses and call backward once, or run each forward right before its own backward.",
    ),
}
"""Title and remedy by why gradients are not averaged."""


def in_source(script: Script) -> Iterator[Finding]:
    """Report gradients of a DDP model that are not averaged."""
    yield from CHECK.suspected(unreduced_gradients(whole_projection(script)))


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report gradients that came past DDP's reduction and differ between the ranks when they are used."""
    from ddpdoctor.diagnosis.training.replicas import unaveraged

    found = ((_SAID[one.why], one) for one in unaveraged(record) if one.why in _SAID)
    verdicts = (one.verdict(title.format(one.model), remedy) for (title, remedy), one in found)
    yield from CHECK.judged(record.job.kind, verdicts)


# Gradients of a DDP model that its reduction never sees, and training state that one rank alone loads.

# What one rank loaded may reach the others by these.
_SHARES_STATE = (
    "broadcast_object_list", "scatter_object_list", "scatter_full_optim", "distribute_bn", "broadcast_optimizer",
)  # fmt: skip
# Variables, attributes and selections on the way from a gradient's inputs to where parameters are asked for.
_DEEPEST = 8
_KEPT_OUT = "this condition keeps the other ranks out"


def unreduced_gradients(projection: Projection) -> Iterator[Verdict]:
    """Calls of ``torch.autograd.grad`` for parameters, and second backward passes through one forward."""
    if averages_by_hand(projection.machine.script):
        return
    asked = {event.node for event in training_events(projection, *PARAMETERS)}
    origins = Origins(projection.machine.script.modules)
    for event in training_events(projection, "torch.autograd.grad"):
        outputs = event.argument("outputs", 0)
        inputs = argument_of(event.node, "inputs", 1)
        for_parameters = inputs is not None and _are_parameters(origins, event.module, inputs, asked)
        if outputs is not None and wrap_numbers(outputs) and for_parameters:
            yield Verdict(
                sentence="torch.autograd.grad returns this rank's gradients: DDP does not average them",
                remedy="Use loss.backward(), or all-reduce the gradients by hand.",
                locations=event.location,
            )
    yield from _second_backwards(projection)
    yield from _own_slices(projection)


# Autograd functions that gather: in their backward the gradients of all ranks have to be added up.

_GATHERS = frozenset({"all_gather", "all_gather_into_tensor", "_all_gather_base"})
_ASKS = frozenset({f"torch.distributed.{name}" for name in ("get_rank", "get_world_size", "is_initialized")})
_CUTS = frozenset({"narrow", "select", "index_select"})
# Methods of tensors, lists and contexts that are known not to communicate.
_OF_ONE_RANK = _CUTS | {
    "save_for_backward", "size", "numel", "dim", "view", "view_as", "reshape", "flatten", "chunk", "split", "unbind",
    "squeeze", "unsqueeze", "contiguous", "clone", "detach", "to", "type", "type_as", "float", "half", "double", "t",
    "transpose", "new_zeros", "new_empty", "zero_", "copy_", "fill_", "add", "add_", "sum", "item", "append",
}  # fmt: skip


def _own_slices(projection: Projection) -> Iterator[Verdict]:
    """Backwards of functions that gather which give back this rank's slice and communicate nowhere.

    A loss times the number of ranks is right where each rank computes all of it.
    """
    modules = projection.machine.script.modules
    backwards = list(projection.of_kind("backward"))
    losses = (loss for event in backwards for loss in (*event.positional, event.receiver or NONE))
    if not any(projection.of_kind("wrap")) or any(kind in _SIZES for loss in losses for kind, _ in tags_of(loss)):
        return
    for module in modules:
        for cls in module.index.of(ast.ClassDef):
            named = [module.resolve(base) for base in cls.bases]
            methods = {one.name: one for one in cls.body if isinstance(one, ast.FunctionDef)}
            forward, backward = methods.get("forward"), methods.get("backward")
            if forward is None or backward is None or not any(map(_IS_FUNCTION.search, named)):
                continue
            gathers = any(last_name(call.func) in _GATHERS for _, call in _calls(modules, module, forward))
            cut = _cut_alone(modules, module, backward) if gathers and _is_applied(modules, cls.name) else None
            if cut is not None:
                yield Verdict(
                    sentence=f"the backward of {cls.name} gives back what this rank's own loss has for what it "
                    "gathered: what the losses of the other ranks have for it is left out",
                    remedy="Add up what all ranks have for it before the slice is taken: all_reduce or reduce_scatter "
                    "of the gradients in backward; or gather by torch.distributed.nn.functional.all_gather, which "
                    "does so.",
                    locations=module.location(backward),
                    because=("this rank's slice is taken, and no collective comes before or after it", cut),
                    severity=Severity.WARNING,
                )


_IS_FUNCTION = regex(r"^torch\.autograd\.(function\.)?Function$")
_SIZES = SIZES | {"share"}


def _calls(
    modules: Sequence[Module], module: Module, function: ast.AST, seen: set[ast.AST] | None = None
) -> Iterator[tuple[Module, ast.Call]]:
    """Yield the calls in a function, and in the functions of the script that may run by their names."""
    seen = {function} if seen is None else seen
    for call in (one for one in descend(function) if isinstance(one, ast.Call)):
        yield module, call
        for home, called in functions_named(modules, last_name(call.func)):
            if called not in seen:
                seen.add(called)
                yield from _calls(modules, home, called, seen)


def _cut_alone(modules: Sequence[Module], module: Module, backward: ast.FunctionDef) -> Location | None:
    """Return where this rank's slice is taken in a backward that was followed to its end and does not communicate."""
    bodies: list[tuple[Module, ast.AST]] = [(module, backward)]
    for home, call in _calls(modules, module, backward):
        name, last = home.resolve(call.func), last_name(call.func)
        own = functions_named(modules, last)
        of_torch = name.startswith("torch.") and not name.startswith("torch.distributed.")
        plain = isinstance(call.func, ast.Name) and last in BUILTINS
        method = isinstance(call.func, ast.Attribute) and last in _OF_ONE_RANK
        if not (own or of_torch or plain or method or name in _ASKS) or last == "apply":
            return None
        bodies += own
    found: Location | None = None
    for home, body in bodies:
        for node in descend(body):
            index = [node.slice] if isinstance(node, ast.Subscript) else []
            if isinstance(node, ast.Call) and last_name(node.func) in _CUTS:
                index = list(node.args)
            parts = [part for one in index for part in made_from(one, body)]
            if found is None and any(text_hints_at_ranks(ast.unparse(part)) for part in parts):
                found = home.location(node)
            if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.Mult):
                left = getattr(node, "left", node)
                counts = text_hints_at_ranks(last_name(getattr(left, "func", left)))
                around = [getattr(one, "func", one) for one in home.ancestors(node)]
                if not counts and not any(isinstance(one, ast.Slice) or last_name(one) in _CUTS for one in around):
                    return None  # A factor may make up for what is left out.
    return found


def _is_applied(modules: Sequence[Module], name: str) -> bool:
    """Return whether a function is used where gradients are recorded."""
    for module in modules:
        for use in module.index.of(ast.Attribute):
            if use.attr == "apply" and last_name(use.value) == name:
                around = list(module.ancestors(use))
                entered = (item.context_expr for one in around if isinstance(one, ast.With) for item in one.items)
                marks = (mark for one in around for mark in getattr(one, "decorator_list", ()))
                if not any(_NO_GRADIENTS.search(ast.unparse(one)) for one in (*entered, *marks)):
                    return True
    return False


_NO_GRADIENTS = regex(r"no_grad|inference_mode")


def _are_parameters(origins: Origins, module: Module, node: ast.expr, asked: set[ast.AST], depth: int = 0) -> bool:
    """Return whether an expression asks a module for its parameters, or selects of what does."""
    if any(one in asked for one in descend(node)) or depth > _DEEPEST:
        return depth <= _DEEPEST
    if isinstance(node, NAMED):
        found = origins.given(module, node)
    elif isinstance(node, (ast.ListComp, ast.GeneratorExp)):
        found = [(module, node.generators[0].iter)]
    else:
        selects = isinstance(node, ast.Call) and last_name(node.func) in ("list", "tuple", "filter")
        found = [(module, one) for one in node.args[-1:]] if selects else []  # type: ignore[attr-defined]
    return any(_are_parameters(origins, home, one, asked, depth + 1) for home, one in found)


def lonely_loads(projection: Projection) -> Iterator[Verdict]:
    """Loads of an optimizer, a scheduler or a scaler that only the first rank comes to."""
    if not is_distributed(projection) or uses_part(projection.machine.script, _SHARES_STATE):
        return
    seen: set[ast.AST] = set()
    loads = [event for event in projection.in_course("call") if event.name == "load_state_dict"]
    for event in loads:
        guard = guard_of(projection, event)
        if event.ranks not in FIRST_RANKS or event.receiver is None or guard is None or event.node in seen:
            continue
        options = [option for option in options_of(event.receiver) if isinstance(option, ExternalObject)]
        elsewhere = any(load.receiver == event.receiver and load.ranks & ~event.ranks for load in loads)
        if options and all(is_training_state(option) for option in options) and not elsewhere:
            seen.add(event.node)
            first = "rank 0" if event.ranks == 1 else "the first rank of each node"
            yield Verdict(
                sentence=f"only {first} loads the state of this {_class_of(options)}, and no wrapper of a model "
                "broadcasts it",
                locations=event.location,
                ranks=(0,) if event.ranks == 1 else (),
                because=(_KEPT_OUT, guard.location),
            )


def lonely_steps(projection: Projection) -> Iterator[Verdict]:
    """Steps of a scheduler that only the first rank comes to, where the others step with its optimizer all the same."""
    if not is_distributed(projection) or uses_part(projection.machine.script, _SHARES_STATE):
        return
    if any(walk.uncertain for walk in projection.walks):
        return  # The others may step it where they were not followed.
    steps = [(event, _stepped(event)) for event in training_events(projection, "step")]
    seen: set[ast.AST] = set()
    for event, stepped in steps:
        guard = guard_of(projection, event)
        options = list(options_of(event.receiver or NONE))
        if event.ranks not in FIRST_RANKS or guard is None or guard.guessed or event.node in seen:
            continue
        made = [projection.machine.object(option) for option in options]
        schedulers = [one for one in made if one is not None and "lr_scheduler" in one.name]
        others = {number for step, numbers in steps if step.ranks & ~event.ranks for number in numbers}
        if not options or len(schedulers) < len(options) or stepped & others:
            continue
        optimizers = [one.argument("optimizer", 0) or NONE for one in schedulers]
        if all(_numbers(optimizer) & others for optimizer in optimizers):
            seen.add(event.node)
            what = _class_of([one for one in options if isinstance(one, ExternalObject)])
            yield Verdict(
                sentence=f"only the first rank steps this {what}: from then on the others train with another learning "
                "rate",
                remedy="Step it on every rank.",
                locations=event.location,
                because=(_KEPT_OUT, guard.location),
            )


def _stepped(event: Event) -> set[int]:
    """Return the numbers of the objects that a step is of: its own, or what a scaler or an accelerator is given."""
    return _numbers(event.receiver or NONE) | _numbers(event.argument("optimizer", 0) or NONE)


def _numbers(value: Value) -> set[int]:
    return {option.number for option in options_of(value) if isinstance(option, ExternalObject)}


def _class_of(options: list[ExternalObject]) -> str:
    names = {option.name for option in options}
    if len(names) == 1 and OPTIMIZER not in names:
        return options[0].name.rpartition(".")[2]
    return "scheduler" if all("lr_scheduler" in name for name in names) else "optimizer"


def _second_backwards(projection: Projection) -> Iterator[Verdict]:
    """Backward passes through the only DDP model after one with ``retain_graph=True``, with no forward between."""
    wraps = list(projection.of_kind("wrap"))
    if len(wraps) != 1:
        return
    number = wraps[0].ordinal
    forwards = training_forwards(projection, number)
    passes = [event for event in projection.in_course("backward") if wrap_numbers(event.receiver) == {number}]
    for first, second in itertools.pairwise(passes):
        flag = argument_of(first.node, "retain_graph", 1)
        retains = isinstance(flag, ast.Constant) and flag.value is True
        alike = loop_nodes(first) == loop_nodes(second) and first.conditions == second.conditions
        between = any(first.ordinal < event.ordinal < second.ordinal for event in forwards)
        before = any(
            event.ordinal < first.ordinal and innermost_loop(event) is innermost_loop(first) for event in forwards
        )
        if retains and alike and before and not between and first.node is not second.node:
            yield Verdict(
                sentence="the gradients of this second backward are not averaged: DDP reduced those of the first",
                remedy="Add the losses and call backward once.",
                locations=second.location,
                because=("the first backward through the same forward", first.location),
            )
