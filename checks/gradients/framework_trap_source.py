"""Where scripts fall into the traps of frameworks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from ddpdoctor.checks.gradients.diverged_replicas import PLATEAU
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import NONE, ExternalObject, Instance, constant, options_of, tags_of
from ddpdoctor.source.libraries.lightning import LOG, has_several
from ddpdoctor.source.libraries.rank_attributes import ACCELERATOR, TRAINERS
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.rank_logging import is_local
from ddpdoctor.source.script.module import Module, descend, last_name, made_from
from ddpdoctor.source.script.script import uses_any
from ddpdoctor.source.vocabulary import DATA_LOADER, FABRICS

Place = tuple[Module, ast.AST]
_CLIPS = frozenset({"torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_"})
_SCHEDULERS = "torch.optim.lr_scheduler."
_LENGTHS = frozenset({"total_steps", "T_max", "num_training_steps", "steps_per_epoch", "total_iters"})
"""Arguments of schedulers that count steps of the optimizer."""
_FSDP = "torch.distributed.fsdp.FullyShardedDataParallel"
_HOROVOD = "horovod.torch.DistributedOptimizer"


# Accelerate and Fabric.


def _accelerators(projection: Projection) -> list[Event]:
    return [event for event in projection.in_course("call") if event.name == ACCELERATOR]


def _steps_often(projection: Projection) -> bool:
    """Return whether a prepared scheduler makes a step for each process."""
    made = _accelerators(projection)
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
    for event in _schedulers(projection):
        if all(isinstance(one, ExternalObject) and one.name == PLATEAU for one in options_of(event.receiver or NONE)):
            yield event.module, event.node


def steps_of_epochs(projection: Projection) -> Iterator[Place]:
    """Yield the steps of prepared schedulers that are made once an epoch."""
    within = [[loop.node for loop in event.loops] for event in projection.in_course("backward")]
    for event in _schedulers(projection):
        around = [loop.node for loop in event.loops]
        plateau = any(
            isinstance(one, ExternalObject) and one.name == PLATEAU for one in options_of(event.receiver or NONE)
        )
        # A backward in a further loop of the same one: the loop around both is that over the epochs.
        if around and not plateau and any(loops[: len(around)] == around < loops for loops in within):
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
        parts = [node for value in given for node in made_from(value, body)]
        if any(last_name(node) == "num_processes" for node in parts):
            continue
        if {ast.unparse(value) for value in given} & set(_ends_of_training(projection, event)):
            yield event.module, event.node
        prepared = _prepared_names(body)
        for node in parts:
            counts = isinstance(node, ast.Call) and last_name(node.func) == "len"
            name = node.args[0] if counts and node.args else None  # type: ignore[attr-defined]
            if isinstance(name, ast.Name) and prepared.get(name.id, name.lineno) < name.lineno:
                yield event.module, event.node


def _ends_of_training(projection: Projection, made: Event) -> Iterator[str]:
    """Yield how the variables are called at which the loop ends that a scheduler steps in, where it makes a step."""
    for step in _schedulers(projection):
        if not any(
            isinstance(one, ExternalObject) and one.number == made.ordinal for one in options_of(step.receiver or NONE)
        ):
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
                yield from map(ast.unparse, (test.left, *test.comparators))


def _prepared_names(body: ast.AST) -> Mapping[str, int]:
    """Return the variables that are given what ``prepare`` returns, with its line."""
    return {
        name.id: node.lineno
        for node in descend(body)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and last_name(node.value.func) == "prepare"
        for target in node.targets
        for name in descend(target)
        if isinstance(name, ast.Name)
    }


def _is_scaled(projection: Projection) -> bool:
    """Return whether the framework multiplies losses by the scale of float16."""
    made = [event for event in projection.in_course("call") if event.name == ACCELERATOR or event.name in FABRICS]
    asked = {constant(one.named.get(name, NONE)) for one in made for name in ("mixed_precision", "precision")}
    return not asked.isdisjoint({"fp16", "16-mixed"}) and not uses_any(projection.machine.script, {"GradScaler"})


def _accumulates(projection: Projection, event: Event) -> bool:
    """Return whether it happens under ``accumulate`` of an Accelerator that has more than one step to gather."""
    steps = [one.named.get("gradient_accumulation_steps") for one in _accelerators(projection)]
    several = any(one is not None and constant(one) not in (1, None) for one in steps)
    return several and any(last_name(getattr(one.node, "func", one.node)) == "accumulate" for one in event.contexts)


def plain_backwards(projection: Projection) -> Iterator[Place]:
    """Yield backwards that go past a framework which scales or divides the loss."""
    scaled = _is_scaled(projection)
    for event in projection.in_course("backward"):
        plain = isinstance(event.node, ast.Call) and not event.node.args
        if plain and (scaled or _accumulates(projection, event)):
            yield event.module, event.node


def divided_twice(projection: Projection) -> Iterator[Place]:
    """Yield divisions of a loss that ``accelerator.backward`` divides as well."""
    for event in projection.in_course("backward"):
        if not isinstance(event.node, ast.Call) or len(event.node.args) != 1 or not _accumulates(projection, event):
            continue
        given = event.node.args[0]
        body = event.module.body_around(event.node)
        values: list[ast.AST] = [given]
        for one in descend(body):
            targets = (
                one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AugAssign) else []
            )
            if any(ast.dump(target).replace("Store", "Load") == ast.dump(given) for target in targets):
                values.append(one if isinstance(one, ast.AugAssign) else one.value)  # type: ignore[attr-defined]
        for value in values:
            divisor = (
                value.right
                if isinstance(value, ast.BinOp)
                else value.value
                if isinstance(value, ast.AugAssign)
                else None
            )
            divides = isinstance(getattr(value, "op", None), ast.Div)
            if divides and divisor is not None and _is_count(projection, divisor):
                yield event.module, value


def _is_count(projection: Projection, divisor: ast.expr) -> bool:
    """Return whether a loss is divided by the number of accumulation steps, by its name or its value."""
    if "accum" in ast.unparse(divisor).lower():
        return True
    steps = [constant(one.named.get("gradient_accumulation_steps", NONE)) for one in _accelerators(projection)]
    return isinstance(divisor, ast.Constant) and divisor.value in steps


def scaled_clips(projection: Projection) -> Iterator[Place]:
    """Yield where gradients are clipped that still bear the scale of float16."""
    if _is_scaled(projection) and not uses_any(projection.machine.script, {"unscale_gradients", "unscale_"}):
        yield from _clips(projection)


def _clips(projection: Projection) -> Iterator[Place]:
    for event in projection.in_course("call"):
        if event.name in _CLIPS:
            yield event.module, event.node


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
        if event.name == "step" and plain and not asks and _accumulates(projection, event):
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
    framework = any(event.name == ACCELERATOR or event.name in FABRICS for event in projection.in_course("call"))
    framework = framework and not _prepares_unread(projection)
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


def _trainers(projection: Projection) -> list[Event]:
    made = [event for event in projection.in_course("call") if event.name in TRAINERS]
    return [one for one in made if has_several(one)]


def state_of_one_rank(projection: Projection) -> Iterator[Place]:
    """Yield what ``prepare_data`` leaves on the object for methods that run on every rank."""
    if not _trainers(projection):
        return
    for module in projection.machine.script.modules:
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
    if not _trainers(projection):
        return
    for module in projection.machine.script.modules:
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


def _monitored(projection: Projection, by_schedule: bool) -> set[str]:
    """Return the names of the values by which schedulers, or callbacks, decide."""
    found: set[str] = set()
    for module in projection.machine.script.modules:
        for call in module.index.of(ast.Call):
            if not by_schedule and last_name(call.func) in ("ModelCheckpoint", "EarlyStopping"):
                given = [one.value for one in call.keywords if one.arg == "monitor"]
                given += call.args[:1] if last_name(call.func) == "EarlyStopping" else []
                found |= {one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)}
        for node in module.index.of(ast.Dict) if by_schedule and "ReduceLROnPlateau" in module.words else ():
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "monitor" and isinstance(value, ast.Constant):
                    found.add(str(value.value))
    return found


def _own_values(projection: Projection, names: set[str]) -> Iterator[Place]:
    """Yield where a module logs values of such names, each rank its own."""
    machine = projection.machine
    for event in projection.in_course("call") if names else ():
        if event.name != LOG or not isinstance(event.receiver, Instance) or not isinstance(event.node, ast.Call):
            continue
        trainer = machine.object(machine.store.get(event.receiver.number, "trainer") or NONE)
        name = event.node.args[0] if event.node.args else None
        named = isinstance(name, ast.Constant) and name.value in names
        if named and trainer is not None and has_several(trainer) and is_local(event.positional[0]):
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
    for module in projection.machine.script.modules if names and _trainers(projection) else ():
        for call in module.index.of(ast.Call):
            only = any(
                one.arg == "rank_zero_only" and getattr(one.value, "value", False) is True for one in call.keywords
            )
            name = call.args[0] if call.args else None
            if only and last_name(call.func) == "log" and isinstance(name, ast.Constant) and name.value in names:
                yield module, call


def undivided_lengths(projection: Projection) -> Iterator[Place]:
    """Yield schedulers whose length is that of a loader which the Trainer divides later."""
    if not _trainers(projection):
        return
    for module in projection.machine.script.modules:
        for function in module.index.of(ast.FunctionDef):
            if function.name != "configure_optimizers":
                continue
            for call in module.index.within(function, ast.Call):
                given = [one.value for one in call.keywords if one.arg in _LENGTHS]
                parts = [node for value in given for node in made_from(value, function)]
                divided = any(last_name(node) in ("world_size", "num_devices", "devices") for node in parts)
                whole = any(
                    isinstance(node, ast.Call)
                    and last_name(node.func) == "len"
                    and "train_dataloader()" in ast.unparse(node)
                    for node in parts
                )
                if whole and not divided:
                    yield module, call


# FSDP and Horovod.


def clips_of_shards(projection: Projection) -> Iterator[Place]:
    """Yield where the shards of FSDP are clipped by their own norms."""
    wraps = [event for event in projection.in_course("call") if event.name == _FSDP]
    if wraps and all(one.complete and "sharding_strategy" not in one.named for one in wraps):
        yield from _clips(projection)


def unequal_starts(projection: Projection) -> Iterator[Place]:
    """Yield optimizers of Horovod in scripts that make the ranks' parameters alike nowhere."""
    alike = {"broadcast_parameters", "broadcast_object", "broadcast_", "broadcast", "manual_seed", "load_state_dict"}
    alike |= {"from_pretrained", "seed_everything", "broadcast_optimizer_state"}
    if not uses_any(projection.machine.script, alike):
        for event in projection.in_course("call"):
            if event.name == _HOROVOD:
                yield event.module, event.node


def clips_before_reduction(projection: Projection) -> Iterator[Place]:
    """Yield where gradients are clipped that Horovod may still reduce."""
    made = any(event.name == _HOROVOD for event in projection.in_course("call"))
    if made and not uses_any(projection.machine.script, {"synchronize", "skip_synchronize"}):
        yield from _clips(projection)
