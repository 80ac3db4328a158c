"""Ranks train on their parts of the data, and nothing averages their gradients.

What it finds
    A script that joins a process group and divides its data with a DistributedSampler or a sampler of its own, but
    never wraps the model in DistributedDataParallel and has nothing else that averages gradients; or whose optimizer
    steps a module beside the wrapped one, as the head or the weights of a loss. In a run also parameters of the
    optimizer that are in no wrapped or sharded module, or are ignored by one, and sharded modules whose gradients are
    reduced over a part of the ranks that train them: a hybrid whose shard dimension has one rank, one dimension of a
    mesh, a group.

Why it is bad
    Every rank trains its own model on its part of the data. The losses fall, the job ends, and rank 0 saves a
    model that has seen one part only; the other ranks' work is thrown away.

Example
    dist.init_process_group("nccl")
    loader = DataLoader(dataset, sampler=DistributedSampler(dataset))
    model = Net().cuda()                    # never wrapped

Remedy
    model = DistributedDataParallel(model, device_ids=[local_rank]), after the model is on its device and before the
    training loop.

When it is wrong
    If independent models are intended, one per rank. FSDP, DeepSpeed, Horovod, Accelerate, Lightning and averaging by
    hand are recognised.

References
    https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.check import Check, Script, Verdict
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import ALL_RANKS, ExternalObject, Instance, Unknown, Value, options_of, tags_of
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.parameters import has_parameters
from ddpdoctor.source.queries.training_loops import division, through_ddp
from ddpdoctor.source.queries.wrapped_models import (
    PARAMETERS,
    averages_by_hand,
    holders,
    innermost_loop,
    is_ddp,
    loop_nodes,
    optimizers,
    reaches_unread,
    stepped,
    steps,
    training_events,
    value_of_root,
    wrap_numbers,
)
from ddpdoctor.source.script.module import Module, descend, made_from
from ddpdoctor.source.script.script import uses_part
from ddpdoctor.source.torch_model.buffers import parts_of_module
from ddpdoctor.source.vocabulary import DDP

CHECK = Check(
    code="DDP214",
    name="missing-ddp-wrap",
    stands_for="no-wrap",
    severity={"source": Severity.WARNING, "rehearsal": Severity.ERROR, "run": Severity.ERROR},
    needs=frozenset({"collectives", "loaders", "passes", "backwards"})
    | {"optimizer_steps", "gradient_digests", "parameter_digests", "written_averages"},
    subjects=("training",),
    triggers=("ampler", "DistributedDataParallel"),
)
BESIDE = "Wrap the module that holds them as well, or average their gradients by dist.all_reduce in each step."


in_run = CHECK.judged_by("checks.gradients.diverged_run", "independent_models")

# Other ways to train on several ranks: gradients may be reduced, or divided, without a wrap by DDP. In `_composable`
# torch keeps replicate, which wraps in place.
_OTHER_WRAPPERS = (
    "FullyShardedDataParallel", "fully_shard", "FSDP", "_composable", "Accelerator", "parallelize_module",
    "distribute_tensor", "rpc_async", "pipelining", "ZeroRedundancy", "average_parameters",
)  # fmt: skip
# Wrap or average where they are imported; a comment that names the source of a helper means nothing.
_OTHER_LIBRARIES = (
    "deepspeed", "horovod", "apex.parallel", "accelerate", "lightning", "fairscale", "bagua", "colossalai", "megatron",
    "smdistributed", "torch_xla", "mmengine", "mmcv", "ignite", "fastai", "composer",
)  # fmt: skip
# They make plain modules: none of them wraps its model for several ranks.
_KNOWN_MAKERS = ("torchvision.", "timm.", "torch.", "transformers.", "peft.", "segmentation_models_pytorch.")


def in_source(script: Script) -> Iterator[Finding]:
    """Report the first backward of a distributed job whose gradients stay on their rank."""
    projection = whole_projection(script)
    yield from _beside(projection)
    init = next((event for event in projection.in_course("collective") if event.name == "init_process_group"), None)
    if init is None or init.ranks != ALL_RANKS or any(projection.of_kind("wrap")):
        return
    if uses_part(script, _OTHER_WRAPPERS) or _imports_library(script):
        return
    if any("_ddp_" in word for module in script.modules for word in module.words):
        return
    if _names_ddp(script) or averages_by_hand(script):
        return
    trained = steps(projection)
    if not any(_trains_known_models(projection, optimizer) for optimizer in optimizers(projection)):
        return
    for backward in projection.in_course("backward"):
        loop = innermost_loop(backward)
        if backward.ranks != ALL_RANKS or not backward.gradients or loop is None:
            continue
        loader = _sharded_loader(projection, backward)
        if loader is not None and any(innermost_loop(step) in loop_nodes(backward) for step in trained):
            yield CHECK.finding(
                "the gradients of this backward stay on their rank: the model is not wrapped in "
                "DistributedDataParallel",
                remedy="Wrap the model in DistributedDataParallel after it is on its device and before the training "
                "loop.",
                locations=backward.location,
                because=(
                    ("the ranks join a process group here", init.location),
                    ("this loader gives every rank its own part of the data", loader.location),
                ),
            )
            return


def _beside(projection: Projection) -> Iterator[Finding]:
    """Report modules that an optimizer steps by the gradients of a DDP model's backward, and that no DDP object holds.

    Only where the source shows what each DDP object wraps, and nothing else can average.
    """
    machine = projection.machine
    script = machine.script
    wraps = list(projection.in_course("wrap"))
    known = all(isinstance(wrap.argument("module", 0), (Instance, ExternalObject)) for wrap in wraps)
    if not wraps or not known or any(wrap.ranks != ALL_RANKS or wrap.name != DDP for wrap in wraps):
        return
    if uses_part(script, _OTHER_WRAPPERS) or _imports_library(script) or averages_by_hand(script):
        return
    frozen = {one.receiver for one in training_events(projection, "requires_grad_") if one.receiver is not None}
    told: set[int] = set()
    for optimizer in optimizers(projection):
        own = [step for step in steps(projection) if optimizer.ordinal in stepped(step) and step.ranks == ALL_RANKS]
        given_to = [*holders(projection, optimizer), *_bare_parameters(projection, optimizer)]
        also = "also " if any(is_ddp(one) or _is_wrapped(machine, one) for one in given_to) else ""
        for held in given_to:
            if not isinstance(held, (Instance, ExternalObject)) or is_ddp(held) or held.number in told:
                continue
            if _is_wrapped(machine, held) or held in frozen or not has_parameters(machine, held):
                continue
            pairs = ((backward, step) for backward in projection.in_course("backward") for step in own)
            used = next((pair for pair in pairs if through_ddp(projection, pair[0]) and _uses(pair[1], pair[0])), None)
            if used is not None and not reaches_unread(projection, held):
                told.add(held.number)
                name = held.cls.node.name if isinstance(held, Instance) else held.name.rpartition(".")[2]
                given = f"the parameters of {name}" if name != "Parameter" else "it"
                name = name if name != "Parameter" else "a parameter"
                yield CHECK.finding(
                    f"the optimizer {also}steps {name}, which is in no module that DistributedDataParallel wraps: its "
                    "gradients stay on their rank",
                    remedy=BESIDE,
                    locations=optimizer.location,
                    because=(
                        (f"the optimizer is given {given} here", optimizer),
                        ("this backward goes through a DDP model as well, whose gradients are averaged", used[0]),
                        ("this step uses them", used[1]),
                    ),
                )


def _is_wrapped(machine: Machine, module: Value) -> bool:
    """Return whether a DDP object holds a module or a part of it."""
    parts = (one.number for one in parts_of_module(machine, module) if isinstance(one, (Instance, ExternalObject)))
    return not machine.wrapped.keys().isdisjoint(parts)


def _bare_parameters(projection: Projection, optimizer: Event) -> Iterator[Value]:
    """Yield the parameters that an optimizer is given by themselves: ``SGD([*model.parameters(), scale])``."""
    for node in made_from(optimizer.node, optimizer.module.body_around(optimizer.node)):
        if isinstance(node, (ast.Name, ast.Attribute)):
            found = value_of_root(projection, optimizer, node)
            yield from (one for one in found if isinstance(one, ExternalObject) and one.name == "torch.nn.Parameter")


def bypassing_forwards(projection: Projection) -> Iterator[Verdict]:
    """Backward passes whose loss comes from a wrapped module and from no DDP forward at all."""
    script = projection.machine.script
    if averages_by_hand(script):
        return
    wraps = {event.ordinal: event for event in projection.of_kind("wrap")}
    forwards = [event for event in training_events(projection, "bare forward") if event.gradients]
    stepping = list(training_events(projection, "step"))
    seen: set[ast.AST] = set()
    for backward in projection.in_course("backward"):
        if not any(_uses(step, backward) for step in stepping):
            continue
        past = None if _has_ddp_forward(projection, backward) else _method_past(projection, backward)
        if past is not None and past.node not in seen:
            seen.add(past.node)
            yield Verdict(
                sentence=_BYPASSES,
                locations=past.location,
                because=(
                    (
                        "it is a method of the module in the DDP object, and this backward is of what it returns",
                        backward,
                    ),
                ),
            )
            continue
        if wrap_numbers(backward.receiver) or any(wrap_numbers(value) for value in backward.positional):
            continue
        for number in sorted(wrap_numbers(backward.receiver, "bare")):
            forward = _forward_before(forwards, backward, projection.machine.wrapped, number)
            if forward is None or number not in wraps or forward.node in seen or _has_ddp_forward(projection, backward):
                continue
            seen.add(forward.node)
            yield Verdict(
                sentence=_BYPASSES,
                locations=forward.location,
                because=(
                    ("no forward through the DDP object leads to this backward", backward),
                    ("the model is wrapped here", wraps[number].location),
                ),
            )


_BYPASSES = "this training forward bypasses DistributedDataParallel: the gradients of its backward are not averaged"
# Methods of a module that compute nothing of a batch.
_NO_FORWARD = frozenset({"state_dict", "parameters", "named_parameters", "train", "eval", "zero_grad", "modules", "to"})


def _method_past(projection: Projection, backward: Event) -> Event | None:
    """Return where a module that is not read is taken out of a DDP object for a method that a backward is of."""
    from ddpdoctor.source.queries.origins import computed_from

    call, module = backward.node, backward.module
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    loss = call.args[0] if backward.receiver is None and call.args else call.func.value
    made = computed_from(module, module.body_around(call), loss)
    for event in projection.in_course("training"):
        if event.name != "ddp.module" or event.module is not module or not event.gradients:
            continue
        method = module.parents.get(event.node)
        called = module.parents.get(method) if isinstance(method, ast.Attribute) else None
        computes = isinstance(method, ast.Attribute) and method.attr not in _NO_FORWARD
        if computes and called in made and isinstance(called, ast.Call) and called.func is method and called.args:
            return event
    return None


def _uses(step: Event, backward: Event) -> bool:
    """Return whether a step may use the gradients of a backward: those for a picture of what it looks at go nowhere."""
    loop = innermost_loop(step)
    return loop is innermost_loop(backward) or (step.function == backward.function and loop in loop_nodes(backward))


def _forward_before(forwards: list[Event], backward: Event, wrapped: dict[int, int], number: int) -> Event | None:
    found: Event | None = None
    for event in forwards:
        inside = isinstance(event.receiver, (Instance, ExternalObject)) and wrapped.get(event.receiver.number) == number
        near = event.ordinal < backward.ordinal and innermost_loop(event) is innermost_loop(backward)
        if inside and near and (found is None or len(event.chain) <= len(found.chain)):
            found = event
    return found


def _has_ddp_forward(projection: Projection, backward: Event) -> bool:
    """Return whether a DDP forward that records gradients is in the same loop, as of a loss that is summed up."""
    loop = innermost_loop(backward)
    return any(event.gradients and innermost_loop(event) is loop for event in projection.in_course("ddp-forward"))


def _sharded_loader(projection: Projection, backward: Event) -> Event | None:
    """Return the loader of a loop around a backward, or of the batches behind its loss, when ranks divide its data."""
    found: list[int] = []
    for loop in backward.loops:
        numbers = {number for kind, number in tags_of(loop.iterable) if kind == "loader"}
        numbers |= {option.number for option in options_of(loop.iterable) if isinstance(option, ExternalObject)}
        found += sorted(numbers)
    if backward.receiver is not None:
        found += sorted(number for kind, number in tags_of(backward.receiver) if kind == "batch")
    for number in found:
        loader = projection.machine.events.get(number)
        if loader is not None and loader.kind == "loader" and division(projection.machine, loader) == "sharded":
            return loader
    return None


def _imports_library(script: Script) -> bool:
    """Return whether a library, or a trainer of one, that may wrap is imported; the project's own is read."""
    return any(
        script.module(entry.module) is None
        and not script.is_package(entry.module)
        and (
            entry.name.endswith("Trainer")
            or any(library in f"{entry.module}.{entry.name}" for library in _OTHER_LIBRARIES)
        )
        for module in script.modules
        for entry in module.imports
    )


def _names_ddp(script: Script) -> bool:
    """Return whether DDP is called or passed around anywhere, reached or not."""
    return any(
        module.resolve(node) == DDP
        for module in script.modules
        for kind in (ast.Name, ast.Attribute)
        for node in module.index.of(kind)
    )


def _trains_known_models(projection: Projection, optimizer: Event) -> bool:
    """Return whether everything that an optimizer holds was made by code that certainly does not wrap it."""
    held = holders(projection, optimizer)
    return bool(held) and all(_is_known_model(optimizer.module, optimizer, value) for value in held)


def _is_known_model(module: Module, optimizer: Event, value: Value) -> bool:
    for option in options_of(value):
        if isinstance(option, Unknown):
            if not _made_by_known_library(module, optimizer):
                return False
        elif not isinstance(option, (Instance, ExternalObject)):
            return False
    return True


def _made_by_known_library(module: Module, optimizer: Event) -> bool:
    """Return whether the models in an optimizer's arguments are assigned from calls of well-known libraries only."""
    made = made_from(optimizer.node, module.body_around(optimizer.node))
    models = [node.value for node in made if isinstance(node, ast.Attribute) and node.attr in PARAMETERS]
    names = {node.id for model in models for node in descend(model) if isinstance(node, ast.Name)}
    found = False
    for node in module.assigning(module.tree, *names):
        head = node.value
        while isinstance(head, ast.Call) and isinstance(head.func, ast.Attribute):
            if module.resolve(head.func).startswith(_KNOWN_MAKERS):
                found = True
                break
            head = head.func.value
        else:
            if isinstance(head, ast.Call) and module.resolve(head.func).startswith(_KNOWN_MAKERS):
                found = True
            elif not isinstance(head, ast.Name) or head.id not in names:
                return False
    return found
