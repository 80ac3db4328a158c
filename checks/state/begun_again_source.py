"""Counters and random orders that begin again after a restart, in a loop that goes on from its checkpoint."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.check import Script, Verdict
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import NONE, ExternalObject, Value, constant, options_of
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.checkpoint_code import key_of, speaks_of
from ddpdoctor.source.queries.job_kind import noted
from ddpdoctor.source.queries.training_loops import feedings
from ddpdoctor.source.script.module import Module, descend, last_name, made_from


def _begins_at_zero(value: ast.expr, loop: ast.For) -> bool:
    """Return whether an expression is 0 in the first turn of a loop, wherever the loop begins."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Sub):
        first = _first(value.left, loop)
        return first is not None and ast.dump(first) == ast.dump(value.right)
    first = _first(value, loop)
    return isinstance(first, ast.Constant) and first.value == 0


def _first(value: ast.expr, loop: ast.For) -> ast.expr | None:
    """Return what a counter is in the first turn of a loop; None for what is not known."""
    target, counted = loop.target, loop.iter
    name = value.id if isinstance(value, ast.Name) else ""
    while isinstance(counted, ast.Call) and counted.args:
        function, from_zero = last_name(counted.func), ast.Constant(0)
        if function in ("range", "trange"):
            known = isinstance(target, ast.Name) and target.id == name
            return None if not known else counted.args[0] if len(counted.args) > 1 else from_zero
        if function == "enumerate" and isinstance(target, ast.Tuple) and len(target.elts) == 2:
            number, target = target.elts
            given = [*counted.args[1:], *(one.value for one in counted.keywords)]
            if isinstance(number, ast.Name) and number.id == name:
                return given[0] if given else from_zero
        elif function != "tqdm":
            break
        counted = counted.args[0]
    return None


def _is_loaded(value: ast.AST, module: Module, body: ast.AST, depth: int = 2) -> bool:
    """Return whether an expression is made from the epoch of what torch.load has returned."""
    parts = list(made_from(value, body))
    calls = [part for part in parts if isinstance(part, ast.Call)]
    is_key = any(speaks_of(key_of(part), ("epoch",)) for part in parts)
    if is_key and any(module.resolve(call.func) == "torch.load" for call in calls):
        return True
    called = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
    return depth > 0 and any(
        _is_loaded(one.value, module, function, depth - 1)
        for function in module.index.of(ast.FunctionDef)
        if function.name in called
        for one in descend(function)
        if isinstance(one, ast.Return) and one.value is not None and not isinstance(one.value, ast.Tuple)
    )


def begun_again(script: Script) -> Iterator[Verdict]:
    """Yield samplers that count from 0 again, and orders that are drawn from random numbers that are seeded again."""
    projection = whole_projection(script)
    made = {event.ordinal: event for event in projection.in_course("sampler")}
    for event in projection.in_course("set-epoch"):
        epochs = _resumed_loop(event)
        given = event.node.args if isinstance(event.node, ast.Call) else []
        options = options_of(event.receiver or NONE)
        numbers = [one.number for one in options if isinstance(one, ExternalObject)]
        samplers = [made[number] for number in numbers if number in made]
        if epochs is None or len(given) != 1 or not samplers or not _begins_at_zero(given[0], epochs):
            continue
        if any(constant(one.argument("shuffle", 3) or NONE) is False for one in samplers):
            continue
        yield Verdict(
            sentence="after a restart the sampler is told the epochs from 0 again, and draws the orders that it has "
            "drawn",
            remedy="Give set_epoch the number of the epoch in the whole training.",
            locations=event.location,
            because=("this loop goes on from the epoch of the checkpoint", event.module.head_location(epochs)),
        )
    yield from _drawn_again(script, projection)
    yield from _counted_again(script, projection)


def _counted_again(script: Script, projection: Projection) -> Iterator[Verdict]:
    """Yield samplers that are told the count of an object which nothing restores beside the epoch of the training."""
    resumed = list(_resumed_counters(script))
    if not resumed or any(module.sets_by_name for module in script.modules):
        return
    made = {event.ordinal: event for event in projection.in_course("sampler")}
    for event in projection.in_course("set-epoch"):
        given = event.node.args[:1] if isinstance(event.node, ast.Call) else []
        owner = next((one for one in event.module.ancestors(event.node) if isinstance(one, ast.ClassDef)), None)
        name = given[0].attr if given and isinstance(given[0], ast.Attribute) else ""
        around = {loop.node for loop in event.loops}
        within = next(((module, loop) for module, loop in resumed if loop in around), None)
        if owner is None or within is None or not name or ast.unparse(given[0]) != f"self.{name}":
            continue
        told = [made.get(getattr(option, "number", 0)) for option in options_of(event.receiver or NONE)]
        if any(one is None or constant(one.argument("shuffle", 3) or NONE) is False for one in told):
            continue
        fed = {option for one in feedings(projection) for option in _samplers(one.loader)}
        begun = _begun_at_zero(event, owner, name) if fed.intersection(_numbers(event.receiver)) else None
        # Whatever else sets an attribute of that name, in any module, may be what restores it.
        others = (
            (module, node)
            for module in script.modules
            for node in module.index.of(ast.Attribute)
            if node.attr == name and isinstance(node.ctx, ast.Store)
        )
        alone = all(module is event.module and node in set(descend(owner)) for module, node in others)
        keys = (f'"{name}"', f"'{name}'")
        if begun is None or not alone or any(key in module.text for key in keys for module in script.modules):
            continue
        module, loop = within
        yield Verdict(
            sentence=f"after a restart `self.{name}` counts from 0 again, and the sampler repeats the orders of its "
            "first epochs",
            remedy="Save and load it with the checkpoint, or give set_epoch the number of the epoch in the training.",
            locations=event.location,
            because=(
                ("it begins here, and nothing restores it", event.module.location(begun)),
                ("this loop goes on from what the checkpoint says", module.head_location(loop)),
            ),
        )


def _samplers(loader: Event) -> Iterator[int]:
    return _numbers(loader.argument("sampler", 3))


def _numbers(value: Value | None) -> Iterator[int]:
    return (one.number for one in options_of(value or NONE) if isinstance(one, ExternalObject))


def _begun_at_zero(event: Event, owner: ast.ClassDef, name: str) -> ast.Assign | None:
    """Return where an attribute is set to 0, if all else that changes it counts by 1 where the sampler is told it."""
    module, around = event.module, event.module.body_around(event.node)
    changes = [
        statement
        for statement in (*module.index.within(owner, ast.Assign), *module.index.within(owner, ast.AugAssign))
        if any(
            isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store)
            for node in descend(statement)
        )
    ]
    begun = [one for one in changes if isinstance(one, ast.Assign)]
    counted = [one for one in changes if isinstance(one, ast.AugAssign)]
    if not all(_counts_turns(module, one, around) for one in counted):
        return None
    counts = bool(counted) and len(begun) == 1
    zero = counts and isinstance(begun[0].value, ast.Constant) and begun[0].value.value == 0
    return begun[0] if zero else None


def _counts_turns(module: Module, change: ast.AugAssign, around: ast.AST) -> bool:
    """Return whether a change adds 1, in a function that loads nothing: another one may skip to where it had been."""
    by_one = isinstance(change.op, ast.Add) and isinstance(change.value, ast.Constant) and change.value.value == 1
    calls = (node for node in descend(around) if isinstance(node, ast.Call))
    return (
        by_one
        and module.body_around(change) is around
        and not any("load" in last_name(call.func).split("_") for call in calls)
    )


def _resumed_counters(script: Script) -> Iterator[tuple[Module, ast.For]]:
    """Yield the loops that begin at a number which is made from what is taken out of a checkpoint by its key."""
    taken = {
        target.attr
        for module in script.modules
        for statement in module.index.of(ast.Assign)
        if key_of(statement.value) and _is_of_checkpoint(module, statement)
        for target in statement.targets
        if isinstance(target, ast.Attribute)
    }
    for module in script.modules:
        for loop in module.index.of(ast.For):
            counted = loop.iter
            first = counted.args[0] if isinstance(counted, ast.Call) and len(counted.args) > 1 else None
            by_range = isinstance(counted, ast.Call) and last_name(counted.func) in ("range", "trange")
            if first is None or not by_range:
                continue
            # A number of steps, divided by those of a pass, is one of epochs.
            of_object = any(isinstance(one, ast.Attribute) and one.attr in taken for one in (first, *descend(first)))
            if of_object or _is_loaded(first, module, module.body_around(loop)):
                yield module, loop


def _is_of_checkpoint(module: Module, statement: ast.Assign) -> bool:
    calls = (part for part in made_from(statement.value, module.body_around(statement)) if isinstance(part, ast.Call))
    return any(module.resolve(call.func) == "torch.load" for call in calls)


def _drawn_again(script: Script, projection: Projection) -> Iterator[Verdict]:
    if any(module.calls_by_name.get(name) for module in script.modules for name in _RESTORING):
        return
    for event in noted(projection, *_ORDERING):
        epochs = _resumed_loop(event)
        if epochs is None or event.argument("generator") is not None:
            continue
        seed = _SEEDS[event.name.partition(".")[0]]
        named = [(m, m.calls_by_name.get(name, ())) for m in script.modules for name in ("seed", "manual_seed")]
        calls = [(module, call) for module, found in named for call in found]
        seeded = [(module, call) for module, call in calls if module.resolve(call.func) == seed]
        inside = set(descend(epochs))
        if seeded and not any(call in inside for _, call in calls):
            module, call = seeded[0]
            yield Verdict(
                sentence="after a restart the orders of the first epochs are drawn again: each start seeds the random "
                "numbers, and no checkpoint holds their state",
                remedy="Seed a generator by the number of the epoch in each epoch, or save and restore the generator's "
                "state.",
                locations=event.location,
                because=("they are seeded here", module.location(call)),
            )


_ORDERING = ("torch.randperm", "random.shuffle", "random.sample", "numpy.random.permutation", "numpy.random.shuffle")
_SEEDS = {"torch": "torch.manual_seed", "random": "random.seed", "numpy": "numpy.random.seed"}
_RESTORING = ("set_rng_state", "setstate", "set_state", "set_rng_state_all")
"""Of the random numbers of torch, Python and NumPy."""


def _resumed_loop(event: Event) -> ast.For | None:
    """Return the innermost loop around a call, where its numbers are made from the epoch of a checkpoint."""
    module, body = event.module, event.module.body_around(event.node)
    loops = (one for one in module.ancestors(event.node) if isinstance(one, (ast.For, ast.While)))
    loop = next(loops, None)
    own = isinstance(loop, ast.For) and module.body_around(loop) is body
    return loop if isinstance(loop, ast.For) and own and _is_loaded(loop.iter, module, body) else None
