"""Parameters are frozen, unfrozen or added after the DDP wrap.

What it finds
    After `DistributedDataParallel(model)` and before training: a changed `requires_grad` of its parameters, or a new
    layer set on the wrapped model. In a run: gradients of parameters that DDP did not list, different on each rank, or
    none for parameters that it waits for.

Why it is bad
    DDP collects the parameters that need a gradient once, in its constructor. One that is unfrozen or added later
    is not averaged: its values drift apart between ranks, silently. One that is frozen later is still waited for, and
    the next forward raises "Expected to have finished reduction in the prior iteration".

Example
    model = DistributedDataParallel(net)
    for parameter in model.module.backbone.parameters():
        parameter.requires_grad = True

Remedy
    Change the model first and wrap it last; to change it during training, wrap it again: DistributedDataParallel(net).

When it is wrong
    Where all parameters of a model are switched off and on again in turn, as GANs do; that is recognised when both
    switches are in the script.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import msgspec

from ddpdoctor.check import AVERAGING, Check, RunRecord, Script, Verdict
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.source.events import Event, Placed
from ddpdoctor.source.interpreter.attributes import class_attribute
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    BoundMethod,
    Const,
    ExternalObject,
    Instance,
    SequenceValue,
    Value,
    constant,
    options_of,
)
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.job_kind import depends_on_mode
from ddpdoctor.source.queries.parameters import HAS_PARAMETERS, fits_on_several
from ddpdoctor.source.queries.wrapped_models import (
    ddp_objects,
    innermost_loop,
    is_ddp,
    training_events,
    training_forwards,
)
from ddpdoctor.source.script.module import descend, last_name
from ddpdoctor.source.script.script import uses_part
from ddpdoctor.source.torch_model.buffers import parts_of_module
from ddpdoctor.source.torch_model.recorded_calls import SET_REQUIRES_GRAD

CHECK = Check(
    code="DDP213",
    name="module-changed-after-wrap",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=AVERAGING,
    subjects=("wrap",),
    triggers=("DistributedDataParallel", "ccelerat", "Fabric", "auto_model", "Finetuning"),
)
REMEDY = "Change the model before the wrap, or wrap it again after the change."
# Nobody wraps again what a framework has wrapped.
_OF_FRAMEWORK = (
    "Let every parameter that is to learn want a gradient when the framework wraps the model, and hold it until then "
    "by a learning rate of 0 in a parameter group of its own, not by requires_grad."
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report changes of a wrapped model's parameters."""
    for change in changes_after_wrap(whole_projection(script)):
        place = change.event.module.location(change.node)
        yield CHECK.finding(
            f"{change.what} after the model was wrapped: DDP fixed the list of parameters that it averages when it "
            "was built",
            remedy=REMEDY,
            locations=place,
            because=((f"{change.what} here", place), ("the model is wrapped here", change.wrap.location)),
        )

    for frozen, wrap in _frozen_in_forwards(script):
        yield CHECK.finding(
            "the forward freezes parameters that DDP listed when it was built, and whose gradients it waits for: the "
            "forward after that fails",
            remedy="Freeze them before the wrap, wrap the model again once they are frozen, or pass "
            "find_unused_parameters=True.",
            locations=frozen.location,
            because=("the model is wrapped here", wrap.location),
        )
    for event, fit in unfrozen_in_hooks(whole_projection(script)):
        yield CHECK.finding(
            "parameters are unfrozen after the Trainer wrapped the module: DDP never lists them, and their gradients "
            "are not averaged",
            remedy=_OF_FRAMEWORK,
            locations=event.location,
            because=("the module is wrapped here, while they are frozen", fit.location),
        )
    for made, fit in unfreezing_callbacks(whole_projection(script)):
        place = made.location
        yield CHECK.finding(
            f"{made.name.rpartition('.')[2]} unfreezes parameters after DDP took its list, and their gradients are "
            "never averaged",
            remedy=_OF_FRAMEWORK,
            locations=place,
            because=("it freezes them before the module is wrapped, which happens here", fit.location),
        )


def _frozen_in_forwards(script: Script) -> Iterator[tuple[Placed, Event]]:
    if uses_part(script, ("requires_grad",)):
        from ddpdoctor.checks.gradients.frozen_in_forward_source import frozen_in_forwards

        yield from frozen_in_forwards(whole_projection(script))


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report what came into a wrapped model and is not averaged, and what DDP waits for for nothing."""
    from ddpdoctor.checks.gradients.steps_run import frozen_after_wrap
    from ddpdoctor.diagnosis.training.replicas import unaveraged
    from ddpdoctor.diagnosis.wording import count

    basis = record.job.kind
    for found in unaveraged(record):
        if found.why == "unlisted":
            yield CHECK.finding(
                f"the gradients of {count(found.unequal, 'parameter')} of {found.model} are not averaged (added or "
                f"unfrozen after the wrap): {', '.join(found.names)}",
                basis=basis,
                remedy=_remedy(record, found.wrap),
                locations=found.wrap_location,
                because=found.because,
            )
    yield from CHECK.judged(basis, frozen_after_wrap(record), REMEDY)


def _remedy(record: RunRecord, number: int) -> str:
    by_user = all(wrap.by_user for wrap in record.wraps if wrap.wrap == number)
    return REMEDY if by_user else _OF_FRAMEWORK


# Hooks of Lightning that run when the strategy has wrapped the module.
_AFTER_WRAP = frozenset(
    {"on_train_start", "on_train_epoch_start", "on_train_batch_start", "training_step", "on_train_batch_end"}
    | {"on_train_epoch_end", "on_validation_epoch_end", "on_validation_end"}
)
# fmt: off
WRAPPER_ATTRIBUTES = frozenset({
    "add_module", "apply", "bfloat16", "broadcast_buffers", "bucket_bytes_cap", "buffers", "children", "compile",
    "cpu", "cuda", "device", "device_ids", "device_type", "dim", "double", "eval", "extra_repr",
    "find_unused_parameters", "float", "forward", "get_buffer", "get_parameter", "get_submodule",
    "gradient_as_bucket_view", "half", "join", "load_state_dict", "logger", "mixed_precision", "module", "modules",
    "named_buffers", "named_children", "named_modules", "named_parameters", "no_sync", "output_device", "parameters",
    "parameters_to_ignore", "process_group", "reducer", "register_backward_hook", "register_buffer",
    "register_comm_hook", "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
    "register_module", "register_parameter", "require_backward_grad_sync", "require_forward_param_sync",
    "requires_grad_", "share_memory", "state_dict", "static_graph", "to", "train", "training", "type",
    "will_sync_module_buffers", "zero_grad",
})  # fmt: skip
# fmt: on
"""Attributes that DDP objects have themselves."""


class Change(msgspec.Struct, frozen=True, eq=False):
    """A change of a wrapped model's parameters."""

    node: ast.AST
    event: Event
    wrap: Event
    what: str
    """A clause that says what is done."""
    switches: bool = True
    """Parameters of the model are switched, none are added to it."""
    rests: bool = False
    """The whole model is frozen, so that DDP waits for nothing of it."""


def changes_after_wrap(projection: Projection) -> Iterator[Change]:
    """Parameters frozen, unfrozen or added after the wrap of a model that is trained afterwards."""
    changes = [*_switches(projection), *_additions(projection)]
    both = {
        (wrap, text) for wrap, text, _, value in changes if (wrap, text, not value) in {c[:2] + c[3:] for c in changes}
    }
    switching = training_events(projection, SET_REQUIRES_GRAD, "requires_grad_")
    off = [event for event in switching if _switched(event) is not True]
    seen: set[ast.AST] = set()
    for number, text, change, value in changes:
        # What no line has frozen already wants a gradient: DDP listed it.
        if value and change.switches and not any(_may_freeze(projection, event, change.wrap) for event in off):
            continue
        searched = constant(change.wrap.named.get("find_unused_parameters", Const(False))) is not False
        if (number, text) in both or change.node in seen or (searched and not value) or change.rests:
            continue
        if _trained_after(projection, change, number):
            seen.add(change.node)
            yield change


def unfreezing_callbacks(projection: Projection) -> Iterator[tuple[Event, Event]]:
    """Yield Lightning's callbacks that unfreeze parts of a module in a job of several ranks, with its ``fit``.

    They freeze in ``setup``, before the strategy wraps the module, so that DDP never lists what they unfreeze later.
    """
    machine = projection.machine
    for fit, trainer in fits_on_several(projection):
        given = trainer.named.get("callbacks")
        for value in given.values if isinstance(given, SequenceValue) else (given,):
            made = machine.object(value) if value is not None else None
            if made is not None and made.name.rpartition(".")[2] == "BackboneFinetuning" and not made.conditions:
                yield made, fit


def unfrozen_in_hooks(projection: Projection) -> Iterator[tuple[Event, Event]]:
    """Yield where hooks of a Trainer with several ranks unfreeze what was frozen before it wrapped the module.

    With its ``fit``.
    """
    fit, _ = next(fits_on_several(projection), (None, None))
    if fit is None:
        return
    frozen: set[str] = set()
    seen: set[ast.AST] = set()
    for event in projection.in_course("training"):
        value, text = _switched(event), _switched_text(event)
        if value is None or not text or event.node in seen:
            continue
        if not _AFTER_WRAP.isdisjoint(frame.function.rpartition(".")[2] for frame in event.chain):
            if value and text in frozen:
                seen.add(event.node)
                yield event, fit
        elif value:
            frozen.discard(text)
        else:
            frozen.add(text)


def _switched(event: Event) -> bool | None:
    """Return whether an event lets parameters want gradients; None where it does neither."""
    if event.name == SET_REQUIRES_GRAD:
        value = constant(event.positional[0])
        return value if isinstance(value, bool) else None
    if event.name == "requires_grad_":
        argument = event.argument("requires_grad", 0)
        value = constant(argument) if argument is not None else True
        return value if isinstance(value, bool) else None
    return None


def _switched_text(event: Event) -> str:
    """Return whose parameters an event switches, as the script writes it: ``self.backbone``."""
    owner: ast.AST = event.node
    loop = event.loops[-1].node if event.loops else None
    if event.name == SET_REQUIRES_GRAD and isinstance(loop, ast.For):
        owner = loop.iter
    elif isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute):
        owner = owner.func.value
    text = ast.unparse(owner)
    return text.removesuffix(".parameters()").removesuffix(".named_parameters()") if text.startswith("self.") else ""


def wrapper_attributes(projection: Projection) -> Iterator[Verdict]:
    """Attributes that a wrapped model's class has and DDP has not, asked of the DDP object."""
    machine, seen = projection.machine, set[ast.AST]()
    for event in projection.in_course("training"):
        if not event.name.startswith("ddp.") or event.node in seen or not isinstance(event.receiver, ExternalObject):
            continue
        name = event.name.removeprefix("ddp.")
        wrap = machine.object(event.receiver)
        module = wrap.argument("module", 0) if wrap is not None else None
        if wrap is None or module is None or name in WRAPPER_ATTRIBUTES or name.startswith("__"):
            continue
        if any("hasattr" in condition or "isinstance" in condition for condition in event.conditions):
            continue
        stored = isinstance(event.node, ast.Attribute) and not isinstance(event.node.ctx, ast.Load)
        if stored or machine.store.get(event.receiver.number, name) is not None:
            continue
        if isinstance(module, Instance):
            own = machine.store.get(module.number, name) or class_attribute(machine, module.cls, name)
            if own is None:
                continue
        elif not _is_used(event) or name.startswith("_") or wrap.conditions or depends_on_mode(event):
            continue  # Of a model that was not read only what is used at once, in a job that certainly wraps it.
        elif any("getattr" in condition for condition in event.conditions):
            continue  # An option that only some scripts declare may choose another engine.
        elif _is_prepared(wrap):
            continue  # A configuration of Accelerate may ask for DeepSpeed, whose engine has methods of its own.
        seen.add(event.node)
        model = module.cls.node.name if isinstance(module, Instance) else "the model"
        yield Verdict(
            sentence=f"the DDP object has no attribute {name}: it is {model}'s, which is .module",
            remedy=f"Write .module.{name}.",
            locations=event.location,
            because=("the model is wrapped here", wrap.location),
        )


def _is_prepared(wrap: Event) -> bool:
    """Return whether Accelerate wraps the model, by what its configuration says."""
    return isinstance(wrap.node, ast.Call) and (last_name(wrap.node.func) or "").startswith("prepare")


def _is_used(event: Event) -> bool:
    """Return whether an attribute is called, or an attribute of it is read: no one but the model can have it."""
    around = event.module.parents.get(event.node)
    called = isinstance(around, ast.Call) and around.func is event.node
    return called or (isinstance(around, ast.Attribute) and isinstance(around.ctx, ast.Load))


def double_wraps(projection: Projection) -> Iterator[tuple[Event, Event]]:
    """Wraps of a model that is certainly a DDP object already, with the wrap that made it one."""
    for wrap in projection.in_course("wrap"):
        module = wrap.argument("module", 0)
        inner = sorted(ddp_objects(module))
        if not inner:
            continue
        again = wrap.ordinal in inner and innermost_loop(wrap) is not None and not wrap.conditions
        made = projection.machine.events.get(inner[0])
        if made is not None and (again or (is_ddp(module) and wrap.ordinal not in inner)):
            yield wrap, made


def late_conversions(projection: Projection) -> Iterator[tuple[Event, Event]]:
    """Conversions to SyncBatchNorm of a model that is already wrapped, with its wrap."""
    machine = projection.machine
    names = ("torch.nn.SyncBatchNorm.convert_sync_batchnorm", "apex.parallel.convert_syncbn_model")
    for event in training_events(projection, *names):
        if not event.positional:
            continue
        numbers = set(ddp_objects(event.positional[0]))
        numbers |= {
            machine.wrapped[option.number]
            for option in options_of(event.positional[0])
            if isinstance(option, (Instance, ExternalObject)) and option.number in machine.wrapped
        }
        for number in sorted(numbers):
            wrap = machine.events.get(number)
            if wrap is not None and wrap.ordinal < event.ordinal and not _comes_first_in_turn(event, wrap):
                yield event, wrap
                break


def _comes_first_in_turn(event: Event, wrap: Event) -> bool:
    """Return whether each turn of the loop around both converts a model that it has made before it wraps it."""
    loop = innermost_loop(event)
    if loop is None or loop is not innermost_loop(wrap) or event.module is not wrap.module:
        return False
    return _end_of(event.node) <= _end_of(wrap.node)


def _end_of(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "end_lineno", 0), getattr(node, "end_col_offset", 0)


_Found = tuple[int, str, Change, bool]
"""DDP object, text that names what is changed, the change, and whether it makes parameters trainable."""


def _switches(projection: Projection) -> Iterator[_Found]:
    """``p.requires_grad = False`` in a loop over parameters, and ``requires_grad_()``."""
    switching = list(training_events(projection, SET_REQUIRES_GRAD, "requires_grad_"))
    for event in training_events(projection, "parameters", "named_parameters"):
        number = _wrap_of(projection, event)
        if number is None:
            continue
        for loop, over_all in _loops_over(event):
            for each in switching:
                value = _switched(each)
                inside = each.scopes == event.scopes and each.loops and each.loops[-1].node is loop
                if inside and value is not None and each.ordinal > event.ordinal:
                    every = over_all and each.module.parents.get(each.node) in loop.body
                    rests = every and _is_whole(projection, event, number)
                    yield _switch(projection, event, number, each.node, value, rests)
    for event in switching:
        number, value = _wrap_of(projection, event), _switched(event)
        if number is not None and value is not None:
            yield _switch(projection, event, number, event.node, value, _is_whole(projection, event, number))


def _may_freeze(projection: Projection, event: Event, wrap: Event) -> bool:
    """Return whether something of a model is frozen by an event before it is wrapped, as far as the source shows."""
    machine, module = projection.machine, wrap.argument("module", 0)
    if event.ordinal > wrap.ordinal or not isinstance(module, Instance):
        return event.ordinal < wrap.ordinal
    # In a method, of what the object holds: the features of a loss are frozen in its own constructor.
    holder = machine.store.get(event.scopes[-1], "self") if event.scopes else None
    if not isinstance(holder, Instance):
        return True
    own, wrapped = (
        {part.number for part in parts_of_module(machine, one) if isinstance(part, (Instance, ExternalObject))}
        for one in (holder, module)
    )
    return not own.isdisjoint(wrapped)


def _loops_over(event: Event) -> Iterator[tuple[ast.For, bool]]:
    """Yield the loops over what an event gives, or over a variable that is made from it, and whether over all of it."""
    statement = next((node for node in event.module.ancestors(event.node) if isinstance(node, ast.stmt)), None)
    if isinstance(statement, ast.For):
        yield statement, True
    elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        name = statement.targets[0].id
        for node in descend(event.module.body_around(event.node)):
            if isinstance(node, ast.For) and isinstance(node.iter, ast.Name) and node.iter.id == name:
                yield node, False


def _is_whole(projection: Projection, event: Event, number: int) -> bool:
    """Return whether an event is of a wrapped model as a whole."""
    module = projection.machine.events[number].argument("module", 0)
    return event.receiver is not None and all(
        ddp_objects(option) or option == module
        for receiver in options_of(event.receiver)
        for option in options_of(receiver.receiver if isinstance(receiver, BoundMethod) else receiver)
    )


def _switch(projection: Projection, event: Event, number: int, node: ast.AST, value: bool, whole: bool) -> _Found:
    what = f"parameters are {'unfrozen' if value else 'frozen'}"
    change = Change(node, event, projection.machine.events[number], what, rests=whole and not value)
    return number, _owner_text(event), change, value


def _owner_text(event: Event) -> str:
    if isinstance(event.node, ast.Call) and isinstance(event.node.func, ast.Attribute):
        return ast.unparse(event.node.func.value)
    return ""


def _additions(projection: Projection) -> Iterator[_Found]:
    """New modules and parameters on a wrapped model."""
    machine = projection.machine
    for event in training_events(projection, "set attribute", "register_parameter", "add_module"):
        number = _wrap_of(projection, event)
        values = [*event.positional, *event.named.values()]
        if number is not None and any(_brings_parameters(machine, value) for value in values):
            change = Change(
                event.node, event, machine.events[number], "a module with parameters is added", switches=False
            )
            yield number, f"{event.ordinal}", change, True


DEEPEST = 3
"""Containers within containers whose parts are looked at."""


def _brings_parameters(machine: Machine, value: Value, depth: int = 0) -> bool:
    """Return whether a module of torch, or one in it, has parameters that no DDP object holds."""
    if not isinstance(value, ExternalObject) or value.number in machine.wrapped or depth > DEEPEST:
        return False
    made = machine.object(value)
    parts = made.positional if made is not None and value.name.startswith("torch.nn.") else ()
    has_own = HAS_PARAMETERS.search(value.name) is not None
    return has_own or any(_brings_parameters(machine, part, depth + 1) for part in parts)


def _wrap_of(projection: Projection, event: Event) -> int | None:
    """Return the DDP object that certainly holds the receiver of an event and was made before it."""
    if event.receiver is None:
        return None
    numbers: set[int | None] = set()
    for option in options_of(event.receiver):
        receiver = option.receiver if isinstance(option, BoundMethod) else option
        if ddp_objects(receiver):
            numbers |= ddp_objects(receiver)
        elif isinstance(receiver, (Instance, ExternalObject)):
            numbers.add(projection.machine.wrapped.get(receiver.number))
        else:
            return None
    number = numbers.pop() if len(numbers) == 1 else None
    wrap = projection.machine.events.get(number) if number is not None else None
    return number if wrap is not None and wrap.ordinal < event.ordinal else None


def _trained_after(projection: Projection, change: Change, number: int) -> bool:
    """Return whether a forward with gradients follows the change, or stands in a loop with it."""
    event = change.event
    around = {loop.node for loop in event.loops}
    for forward in training_forwards(projection, number):
        shared = [loop.node for loop in forward.loops if loop.node in around and not loop.once]
        if forward.ordinal > event.ordinal or shared:
            return True
    return False
