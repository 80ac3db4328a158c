"""A framework does something else with several ranks than its call says.

What it finds
    Calls of Accelerate, Lightning, Fabric, FSDP and Horovod that mean another thing with several ranks than with one,
    each known from the framework's documentation or its issue threads: a prepared scheduler that is stepped once for
    each process, a monitored value that every rank logs for itself, state that prepare_data leaves on one rank only,
    gradients that are scaled, clipped or averaged at another time than the script assumes.

Why it is bad
    The script runs, and trains something else: learning rates that fall N times too fast or differ between the ranks,
    gradients that are divided twice or not averaged, the wrong checkpoint as the best one.

Example
    scheduler = accelerator.prepare(ReduceLROnPlateau(optimizer))
    scheduler.step(loss)                    # N processes: N steps

Remedy
    What the finding says: each trap has its own.

When it is wrong
    With one process, and where the script corrects for it elsewhere.

References
    https://huggingface.co/docs/accelerate/concept_guides/performance
    https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation
    https://lightning.ai/docs/pytorch/stable/visualize/logging_advanced.html
    https://horovod.readthedocs.io/en/stable/pytorch.html
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator

import msgspec

from ddpdoctor.check import Check, Script
from ddpdoctor.checks.gradients.diverged_replicas import PLATEAU
from ddpdoctor.checks.gradients.schedule_length_source import short_once_prepared
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import NONE, External, ExternalObject, Instance, constant, options_of, tags_of
from ddpdoctor.source.libraries.lightning import LOG, LOG_OF_FIRST, has_several, names_logged
from ddpdoctor.source.libraries.rank_attributes import ACCELERATOR, TRAINERS
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.job_kind import noted
from ddpdoctor.source.queries.origins import Origins
from ddpdoctor.source.queries.rank_logging import is_local
from ddpdoctor.source.script.module import Module, descend, last_name, made_from
from ddpdoctor.source.script.script import uses_any
from ddpdoctor.source.vocabulary import DATA_LOADER, FABRICS

CHECK = Check(
    code="DDP224",
    name="framework-trap",
    severity={"source": Severity.WARNING},
    subjects=("training",),
    triggers=("ccelerator", "ightning", "Fabric", "horovod", "FullyShardedDataParallel"),
)
Place = tuple[Module, ast.AST]
_CLIPS = frozenset({"torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_"})
_SCHEDULERS = "torch.optim.lr_scheduler."
# Arguments of schedulers that count steps of the optimizer.
_LENGTHS = frozenset({"total_steps", "T_max", "num_training_steps", "steps_per_epoch", "total_iters"})
_FSDP = "torch.distributed.fsdp.FullyShardedDataParallel"
_HOROVOD = "horovod.torch.DistributedOptimizer"


# Accelerate and Fabric.


def _steps_often(projection: Projection) -> bool:
    """Return whether a prepared scheduler makes a step for each process."""
    made = list(noted(projection, ACCELERATOR))
    own = {"step_scheduler_with_optimizer", "split_batches", "dataloader_config"}
    return bool(made) and all(one.complete and own.isdisjoint(one.named) for one in made)


def _schedulers(projection: Projection) -> Iterator[Event]:
    """Yield the steps of schedulers that were prepared."""
    if not _steps_often(projection):
        return
    for event in projection.in_course("training"):
        options = [] if event.receiver is None else list(options_of(event.receiver))
        if event.name == "step" and options and all(_is_scheduler(projection, one) for one in options):
            yield event


def _is_scheduler(projection: Projection, one: object) -> bool:
    known = isinstance(one, ExternalObject) and one.name.startswith(_SCHEDULERS)
    return known and one.number in projection.machine.prepared  # type: ignore[attr-defined]


def prepared_plateaus(projection: Projection) -> Iterator[Place]:
    """Yield the steps of every ``ReduceLROnPlateau`` that went through ``prepare``."""
    yield from ((event.module, event.node) for event in _schedulers(projection) if _is_plateau(event))


def _is_plateau(event: Event) -> bool:
    return all(isinstance(one, ExternalObject) and one.name == PLATEAU for one in options_of(event.receiver or NONE))


def steps_of_epochs(projection: Projection) -> Iterator[Place]:
    """Yield the steps of prepared schedulers that are made once an epoch."""
    within = [[loop.node for loop in event.loops] for event in projection.in_course("backward")]
    for event in _schedulers(projection):
        around = [loop.node for loop in event.loops]
        # A backward in a further loop of the same one: the loop around both is that over the epochs.
        if around and not _is_plateau(event) and any(loops[: len(around)] == around < loops for loops in within):
            yield event.module, event.node


def lengths_of_prepared(projection: Projection) -> Iterator[Place]:
    """Yield prepared schedulers that are as long as a loader which was prepared before, or as the training itself."""
    if not _steps_often(projection):
        return
    machine = projection.machine
    for event in filter(None, map(machine.events.get, sorted(machine.prepared))):
        if not event.name.startswith(_SCHEDULERS) or not isinstance(event.node, ast.Call):
            continue
        body = event.module.body_around(event.node)
        given = [one.value for one in event.node.keywords if one.arg in _LENGTHS]
        given += event.node.args if last_name(event.node.func).islower() else []
        parts = [node for value in given for node in made_from(value, body)]
        if any(last_name(node) == "num_processes" for node in parts):
            continue
        ends = set(_ends_of_training(_schedulers(projection), event))
        if {ast.unparse(value) for value in given} & ends:
            yield event.module, event.node
        makers = (call for call in event.module.index.of(ast.Call) if last_name(call.func) == getattr(body, "name", ""))
        returned = (one for one in descend(body) if isinstance(one, ast.Return) and event.node in descend(one))
        for call in makers if not given and any(returned) else ():
            # A project's own function makes it: what that is given is the length where the training ends there.
            if {ast.unparse(value) for value in (*call.args, *(one.value for one in call.keywords))} & ends:
                yield event.module, call
        if short_once_prepared(projection, event):
            yield event.module, event.node


def _is_scaled(projection: Projection) -> bool:
    """Return whether the framework multiplies losses by the scale of float16."""
    made = noted(projection, ACCELERATOR, *FABRICS)
    asked = {constant(one.named.get(name, NONE)) for one in made for name in ("mixed_precision", "precision")}
    return not asked.isdisjoint({"fp16", "16-mixed"}) and not uses_any(projection.machine.script, {"GradScaler"})


def gathers_steps(projection: Projection, event: Event) -> bool:
    """Return whether it happens under ``accumulate`` of an Accelerator that has more than one step to gather."""
    steps = [one.named.get("gradient_accumulation_steps") for one in noted(projection, ACCELERATOR)]
    several = any(one is not None and constant(one) not in (1, None) for one in steps)
    return several and any(last_name(getattr(one.node, "func", one.node)) == "accumulate" for one in event.contexts)


def plain_backwards(projection: Projection) -> Iterator[Place]:
    """Yield backwards that go past a framework which scales or divides the loss."""
    scaled = _is_scaled(projection)
    for event in projection.in_course("backward"):
        plain = isinstance(event.node, ast.Call) and not event.node.args
        if plain and (scaled or gathers_steps(projection, event)):
            yield event.module, event.node


def divided_twice(projection: Projection) -> Iterator[Place]:
    """Yield divisions of a loss that ``accelerator.backward`` divides as well."""
    for event in projection.in_course("backward"):
        if not isinstance(event.node, ast.Call) or len(event.node.args) != 1 or not gathers_steps(projection, event):
            continue
        given = event.node.args[0]
        body = event.module.body_around(event.node)
        values: list[ast.AST] = [given]
        for one in descend(body):
            targets = getattr(one, "targets", [one.target] if isinstance(one, ast.AugAssign) else [])
            if any(ast.dump(target).replace("Store", "Load") == ast.dump(given) for target in targets):
                values.append(one if isinstance(one, ast.AugAssign) else one.value)  # type: ignore[attr-defined]
        for value in values:
            if not isinstance(value, (ast.BinOp, ast.AugAssign)) or not isinstance(value.op, ast.Div):
                continue
            if _is_count(projection, value.right if isinstance(value, ast.BinOp) else value.value):
                yield event.module, value


def _is_count(projection: Projection, divisor: ast.expr) -> bool:
    """Return whether a loss is divided by the number of accumulation steps, by its name or its value."""
    if "accum" in ast.unparse(divisor).lower():
        return True
    steps = [constant(one.named.get("gradient_accumulation_steps", NONE)) for one in noted(projection, ACCELERATOR)]
    return isinstance(divisor, ast.Constant) and divisor.value in steps


def scaled_clips(projection: Projection) -> Iterator[Place]:
    """Yield where gradients are clipped that still bear the scale of float16."""
    if _is_scaled(projection) and not uses_any(projection.machine.script, {"unscale_gradients", "unscale_"}):
        yield from _clips(projection)


def _clips(projection: Projection) -> Iterator[Place]:
    return ((event.module, event.node) for event in noted(projection, *_CLIPS))


def unprepared_optimizers(projection: Projection) -> Iterator[Place]:
    """Yield steps under ``accumulate`` of an optimizer that was not prepared."""
    if _prepares_unread(projection):
        return
    for event in projection.in_course("training"):
        options = [] if event.receiver is None else list(options_of(event.receiver))
        plain = bool(options) and all(
            isinstance(one, ExternalObject)
            and re.match(r"torch\.optim\.[A-Z]", one.name)
            and one.number not in projection.machine.prepared
            for one in options
        )
        asks = any("sync_gradients" in condition for condition in event.conditions)
        if event.name == "step" and plain and not asks and gathers_steps(projection, event):
            yield event.module, event.node


def _prepares_unread(projection: Projection) -> bool:
    """Return whether the script prepares something that cannot be told from the call."""
    calls = (call for module in projection.machine.script.modules for call in module.index.of(ast.Call))
    return uses_any(projection.machine.script, {"prepare_optimizer", "prepare_data_loader"}) or any(
        last_name(call.func) == "prepare" and any(not isinstance(one, (ast.Name, ast.Attribute)) for one in call.args)
        for call in calls
    )


def undivided_loaders(projection: Projection) -> Iterator[Place]:
    """Yield loaders of batches that train a model which a framework wraps, and which it was not given to divide."""
    machine = projection.machine
    framework = any(noted(projection, ACCELERATOR, *FABRICS)) and not _prepares_unread(projection)
    for event in projection.in_course("backward") if framework else ():
        for loop in event.loops:
            for one in options_of(loop.iterable):
                numbers = (
                    {one.number}
                    if isinstance(one, ExternalObject)
                    else {number for kind, number in tags_of(one) if kind == "loader"}
                )
                for number in numbers - machine.prepared:
                    made = machine.events.get(number)
                    if made is None or made.name != DATA_LOADER or not made.complete or made.conditions:
                        continue
                    shuffled = constant(made.named.get("shuffle", NONE)) is True
                    if shuffled and not {"sampler", "batch_sampler"} & made.named.keys():
                        yield made.module, made.node


# Lightning.


def _modules(projection: Projection) -> tuple[Module, ...]:
    """Return the modules of a script with a Trainer of several ranks; none of another script."""
    several = any(has_several(projection.machine, one) for one in noted(projection, *TRAINERS))
    return projection.machine.script.modules if several else ()


def state_of_one_rank(projection: Projection) -> Iterator[Place]:
    """Yield what ``prepare_data`` leaves on the object for methods that run on every rank."""
    for module in _modules(projection):
        for cls in module.index.of(ast.ClassDef):
            methods = {one.name: one for one in cls.body if isinstance(one, ast.FunctionDef)}
            prepares = methods.pop("prepare_data", None)
            if prepares is None or not any("Lightning" in ast.unparse(base) for base in cls.bases):
                continue
            others = [node for method in methods.values() for node in descend(method)]
            stored = {node.attr for node in others if _is_own(node, ast.Store)}  # type: ignore[attr-defined]
            read = {node.attr for node in others if _is_own(node, ast.Load)}  # type: ignore[attr-defined]
            for node in descend(prepares):
                if _is_own(node, ast.Store) and node.attr in read - stored:  # type: ignore[attr-defined]
                    yield module, node


def _is_own(node: ast.AST, context: type) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, context)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def values_of_one_rank(projection: Projection) -> Iterator[Place]:
    """Yield where the value of a function is used that ``rank_zero_only`` guards."""
    for module in _modules(projection):
        functions = {
            one.name
            for one in module.index.of(ast.FunctionDef)
            if any(
                "ightning" in module.resolve(mark) and last_name(mark) == "rank_zero_only"
                for mark in one.decorator_list
            )
            and any(isinstance(node, ast.Return) and node.value is not None for node in descend(one))
        }
        for call in module.index.of(ast.Call) if functions else ():
            around = list(module.ancestors(call))
            used = not isinstance(module.parents.get(call), ast.Expr)
            guarded = any(
                (
                    isinstance(one, ast.If)
                    and any(word in ast.unparse(one.test) for word in ("rank", "zero", "main", "master"))
                )
                or (isinstance(one, ast.FunctionDef) and any("rank_zero" in ast.unparse(d) for d in one.decorator_list))
                for one in around
            )
            if last_name(call.func) in functions and used and not guarded:
                yield module, call


def _monitored(projection: Projection, by_schedule: bool) -> set[object]:
    """Return the names of the values by which schedulers, or callbacks, decide."""
    found: set[object] = set()
    origins = Origins(projection.machine.script.modules)
    for module in projection.machine.script.modules:
        for call in module.index.of(ast.Call):
            if not by_schedule and last_name(call.func) in ("ModelCheckpoint", "EarlyStopping"):
                given = [one.value for one in call.keywords if one.arg == "monitor"]
                given += call.args[:1] if last_name(call.func) == "EarlyStopping" else []
                found.update(name for one in given for name in _names_of(origins, module, one))
        for node in module.index.of(ast.Dict) if by_schedule and "ReduceLROnPlateau" in module.words else ():
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "monitor":
                    found.update(_names_of(origins, module, value))
    return found


def _names_of(origins: Origins, module: Module, node: ast.expr) -> Iterator[str]:
    """Yield the texts that an expression may be: written out, by a variable, or one after the other of a list."""
    for one in [node, *origins.made(module, node)]:
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value
    for how, home, value in (origins.bindings(module, node) or ()) if isinstance(node, ast.Name) else ():
        if how == "item" and isinstance(value, (ast.Tuple, ast.List)):
            for one in value.elts:
                yield from _names_of(origins, home, one)


def _logged(projection: Projection, kind: str, names: set[object]) -> Iterator[Event]:
    """Yield where a module logs values of such names in one way."""
    for event in projection.in_course("call") if names else ():
        if event.name == kind and isinstance(event.receiver, Instance) and names_logged(event) & names:
            yield event


def _own_values(projection: Projection, names: set[object]) -> Iterator[Place]:
    """Yield where a module logs values of such names, each rank its own."""
    machine = projection.machine
    for event in _logged(projection, LOG, names):
        trainer = machine.object(machine.store.get(event.receiver.number, "trainer") or NONE)  # type: ignore[union-attr]
        if trainer is not None and has_several(machine, trainer) and is_local(event.positional[0]):
            yield event.module, event.node


def own_schedules(projection: Projection) -> Iterator[Place]:
    """Yield where a value is logged, each rank its own, by which a ``ReduceLROnPlateau`` decides."""
    yield from _own_values(projection, _monitored(projection, by_schedule=True))


def own_monitors(projection: Projection) -> Iterator[Place]:
    """Yield where a value is logged, each rank its own, by which a callback decides."""
    names = _monitored(projection, by_schedule=False) - _monitored(projection, by_schedule=True)
    yield from _own_values(projection, names)


def monitors_of_one_rank(projection: Projection) -> Iterator[Place]:
    """Yield where only rank 0 logs a value that is monitored."""
    names = _monitored(projection, by_schedule=False) | _monitored(projection, by_schedule=True)
    yield from ((event.module, event.node) for event in _logged(projection, LOG_OF_FIRST, names))


def undivided_lengths(projection: Projection) -> Iterator[Place]:
    """Yield schedulers whose length is that of a loader which the Trainer divides later."""
    for module in _modules(projection):
        for function in module.index.of(ast.FunctionDef):
            if function.name != "configure_optimizers":
                continue
            for call in module.index.within(function, ast.Call):
                name = module.resolve(call.func)
                schedules = name.startswith(_SCHEDULERS) or "_schedule" in name
                given = [one.value for one in call.keywords if schedules or one.arg in _LENGTHS]
                given += call.args if schedules else []
                parts = [node for value in given for node in made_from(value, function)]
                divided = any(last_name(node) in ("world_size", "num_devices", "devices") for node in parts)
                lengths = (node for node in parts if isinstance(node, ast.Call) and last_name(node.func) == "len")
                if any("train_dataloader()" in ast.unparse(node) for node in lengths) and not divided:
                    yield module, call


# FSDP and Horovod.


def clips_of_shards(projection: Projection) -> Iterator[Place]:
    """Yield where the shards of FSDP are clipped by their own norms."""
    wraps = list(noted(projection, _FSDP))
    strategies = [one.argument("sharding_strategy", 2) or NONE for one in wraps if one.complete]
    # All but NO_SHARD leave a rank a part of each gradient. A clip by value looks at each element alone.
    given = (one for strategy in strategies for one in options_of(strategy) if constant(one) is not None)
    parts = all(isinstance(one, External) and not one.name.endswith("NO_SHARD") for one in given)
    if wraps and len(strategies) == len(wraps) and parts:
        yield from ((event.module, event.node) for event in noted(projection, "torch.nn.utils.clip_grad_norm_"))


def unequal_starts(projection: Projection) -> Iterator[Place]:
    """Yield optimizers of Horovod in scripts that make the ranks' parameters alike nowhere."""
    alike = {"broadcast_parameters", "broadcast_object", "broadcast_", "broadcast", "manual_seed", "load_state_dict"}
    alike |= {"from_pretrained", "seed_everything", "broadcast_optimizer_state"}
    if not uses_any(projection.machine.script, alike):
        yield from ((event.module, event.node) for event in noted(projection, _HOROVOD))


def clips_before_reduction(projection: Projection) -> Iterator[Place]:
    """Yield where gradients are clipped that Horovod may still reduce."""
    synchronises = uses_any(projection.machine.script, {"synchronize", "skip_synchronize"})
    if any(noted(projection, _HOROVOD)) and not synchronises:
        yield from _clips(projection)


class Trap(msgspec.Struct, frozen=True):
    """One trap: where a script falls into it, and what to do instead."""

    find: Callable[[Projection], Iterator[Place]]
    title: str
    remedy: str
    severity: Severity | None = None


def in_source(script: Script) -> Iterator[Finding]:
    """Report every place where the script falls into a trap."""
    projection = whole_projection(script)
    for trap in TRAPS:
        for module, node in dict.fromkeys(trap.find(projection)):
            yield CHECK.finding(
                trap.title, remedy=trap.remedy, locations=(module.location(node),), severity=trap.severity
            )


TRAPS = (
    Trap(
        # accelerate/scheduler.py; accelerate#1398, #2142.
        prepared_plateaus,
        "a ReduceLROnPlateau that went through prepare is stepped once for each process, and its patience runs out as "
        "many times faster",
        "Do not give it to accelerator.prepare: step it as it is, with the reduced value.",
    ),
    Trap(
        # accelerate#2926, #2773.
        steps_of_epochs,
        "a scheduler that went through prepare makes a step for each process at every call, though it is called once "
        "an epoch",
        "Do not give it to accelerator.prepare: a schedule in epochs is not to be scaled by the number of processes.",
    ),
    Trap(
        # accelerate#662, diffusers#3954, transformers#24088, LTX-Video-Trainer#67.
        lengths_of_prepared,
        "this schedule is as long as the training of one process, and once prepared it makes a step for each process: "
        "it ends after the N-th part of the training",
        "Multiply its length by accelerator.num_processes, or do not give it to prepare.",
    ),
    Trap(
        # Accelerate's guide to gradient accumulation; Fabric's to its methods.
        plain_backwards,
        "this backward leaves out what the framework does to the loss: its scale for float16, or the division by the "
        "accumulation steps",
        "Call backward of the Accelerator or Fabric with the loss.",
    ),
    Trap(
        # Accelerate's guide to gradient accumulation; accelerate/accelerator.py, backward.
        divided_twice,
        "the loss is divided by the accumulation steps, and accelerator.backward divides it again",
        "Leave the division to accelerator.backward.",
    ),
    Trap(
        # Accelerate's guide to mixed precision; torch's notes on GradScaler.
        scaled_clips,
        "these gradients still bear the scale of float16 when they are clipped, so that nearly all of them are cut",
        "Use clip_grad_norm_ of the Accelerator, or clip_gradients of the Fabric, which unscale them first.",
    ),
    Trap(
        # accelerate/optimizer.py; accelerate/accelerator.py, accumulate.
        unprepared_optimizers,
        "this optimizer was not prepared, and steps on every micro-batch under accumulate, with gradients that are not "
        "averaged: the replicas diverge",
        "Give the optimizer to accelerator.prepare, which lets it step when the gradients were averaged.",
        Severity.ERROR,
    ),
    Trap(
        # Accelerate's and Fabric's quick tours.
        undivided_loaders,
        "this loader was not given to the framework, which would divide it: each rank trains on all samples",
        "Give the loader to accelerator.prepare, or to fabric.setup_dataloaders.",
    ),
    Trap(
        # Lightning's documentation of LightningDataModule.prepare_data.
        state_of_one_rank,
        "prepare_data runs in one process of a node, and the others never get this attribute",
        "Set it in setup, which runs on every rank; leave downloads in prepare_data.",
        Severity.ERROR,
    ),
    Trap(
        # lightning_utilities/core/rank_zero.py.
        values_of_one_rank,
        "a function that rank_zero_only guards returns None on all other ranks, and this uses what it returns",
        "Broadcast the value from rank 0, or compute it on every rank.",
    ),
    Trap(
        # lightning/pytorch/loops/training_epoch_loop.py; Lightning#8727.
        own_schedules,
        "ReduceLROnPlateau decides on each rank by the value that this rank logged: learning rates, and with them the "
        "replicas, come apart",
        "Give self.log sync_dist=True.",
        Severity.ERROR,
    ),
    Trap(
        # Lightning#5865, #379.
        own_monitors,
        "a callback judges by the value that each rank logged of its own part of the data",
        "Give self.log sync_dist=True.",
    ),
    Trap(
        # Lightning's documentation of log.
        monitors_of_one_rank,
        "a value that only rank 0 logs is monitored on every rank",
        "Log it on every rank, with sync_dist=True in place of rank_zero_only=True.",
        Severity.ERROR,
    ),
    Trap(
        # Lightning's documentation of estimated_stepping_batches.
        undivided_lengths,
        "this schedule is as long as the loader before the Trainer divides it: with N ranks the training ends at the "
        "N-th part of the schedule",
        "Use self.trainer.estimated_stepping_batches, which counts the steps of one rank.",
    ),
    Trap(
        # torch's documentation of FullyShardedDataParallel.clip_grad_norm_.
        clips_of_shards,
        "each rank clips its own shard by that shard's norm: FSDP needs the norm over all of them",
        "Use model.clip_grad_norm_ of the FSDP model.",
    ),
    Trap(
        # Horovod's guide to PyTorch, step 6.
        unequal_starts,
        "the ranks start from parameters of their own: DistributedOptimizer averages gradients and broadcasts nothing",
        "Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the training.",
        Severity.ERROR,
    ),
    Trap(
        # Horovod's guide to PyTorch, about gradient clipping.
        clips_before_reduction,
        "the gradients are clipped while Horovod still averages them: step is what waits for it",
        "Call optimizer.synchronize() before, and step under optimizer.skip_synchronize().",
    ),
)


def _ends_of_training(steps: Iterable[Event], made: Event) -> Iterator[str]:
    """Yield how the variables are called at which the loop ends that a scheduler steps in, where it makes a step."""
    for step in steps:
        stepped = options_of(step.receiver or NONE)
        if not any(isinstance(one, ExternalObject) and one.number == made.ordinal for one in stepped):
            continue
        for loop in step.loops:
            node = loop.node
            if isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and last_name(node.iter.func) == "range":
                yield from map(ast.unparse, node.iter.args)
            tests = [node.test] if isinstance(node, ast.While) else []
            tests += [
                one.test for one in descend(node) if isinstance(one, ast.If) and isinstance(one.body[-1], ast.Break)
            ]
            for test in (one for one in tests if isinstance(one, ast.Compare)):
                sides = (test.left, *test.comparators)
                yield from (ast.unparse(side) for side in sides if _is_fixed(made, side))


def _is_fixed(made: Event, end: ast.expr) -> bool:
    """Return whether the end of the training is no loader's length, which ``prepare`` divides, nor set anew later."""
    body, name = made.module.body_around(made.node), ast.unparse(end)
    given = [
        one
        for one in descend(body)
        if isinstance(one, ast.Assign) and name in {ast.unparse(part) for each in one.targets for part in descend(each)}
    ]
    later = any(one.lineno > getattr(made.node, "lineno", 0) for one in given)
    parts = (node for one in given for node in made_from(one.value, body))
    return not later and not any(isinstance(node, ast.Call) and last_name(node.func) == "len" for node in parts)
