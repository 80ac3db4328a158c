"""The DDP objects of a script, and what reads or averages gradients beside them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from ddpdoctor.check import Reason, Verdict
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ExternalObject, Instance, Value, options_of, tags_of
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.parameters import HAS_PARAMETERS
from ddpdoctor.source.script.module import Module, all_once, descend, last_name, made_from, origins_of, parameters_of
from ddpdoctor.source.script.script import Script, calls_any, uses_part
from ddpdoctor.source.torch_model.buffers import parts_of_module
from ddpdoctor.source.torch_model.recorded_calls import SHARDED
from ddpdoctor.source.vocabulary import DDP

_AVERAGERS = ("all_reduce", "allreduce", "average_grad", "sync_grad", "reduce_grad", "average_param", "sync_param")
# They leave each gradient with the rank that steps its parameter, as optimizers do that divide their state.
_REDUCING_IN_PARTS = frozenset({"reduce", "reduce_scatter", "reduce_scatter_tensor"})
_COLLECTIVE_NAMES = frozenset({"all_reduce", "all_reduce_coalesced", "all_gather", "allreduce"}) | _REDUCING_IN_PARTS
# They average gradients in two halves: one rank collects them, and gives the mean back.
_BRINGING_TOGETHER = frozenset({"gather", "scatter", "send", "isend", "batch_isend_irecv"})
_GRADIENT_WORDS = (".grad", "grad", "parameters()")
_GRADIENTS = frozenset({"grad"})
# Methods that Python calls, and the walk where Python does.
_FOLLOWED = frozenset({"__call__", "__enter__", "__exit__"})
PARAMETERS = frozenset({"parameters", "named_parameters"})
"""Methods of a module that give its parameters."""
# What is handed on of them is no norm or count, as the ranks reduce it.
_WEIGHTS = _GRADIENTS | PARAMETERS | {"state_dict"}


def wrap_numbers(value: Value | None, kind: str = "ddp") -> frozenset[int]:
    """Return the DDP objects that a value went through (``ddp``) or whose module it came from (``bare``)."""
    if value is None:
        return frozenset()
    return frozenset(number for tag, number in tags_of(value) if tag == kind)


def ddp_objects(value: Value | None) -> frozenset[int]:
    """Return the numbers of the DDP objects that a value may be."""
    if value is None:
        return frozenset()
    return frozenset(
        option.number for option in options_of(value) if isinstance(option, ExternalObject) and option.name == DDP
    )


def is_ddp(value: Value | None) -> bool:
    """Return whether a value is certainly a DDP object."""
    if value is None:
        return False
    options = list(options_of(value))
    return bool(options) and all(isinstance(option, ExternalObject) and option.name == DDP for option in options)


def numbers_of(value: Value | None) -> frozenset[int]:
    """Return the numbers of the objects that a value may be."""
    options = options_of(value) if value is not None else ()
    return frozenset(option.number for option in options if isinstance(option, (ExternalObject, Instance)))


def value_of_root(projection: Projection, event: Event, node: ast.expr) -> Iterator[Value]:
    """Yield what an expression starts from may be, at the end of the walk: ``net`` of ``net[0].parameters()``.

    Of ``self.model.layers`` that is the attribute.
    """
    store = projection.machine.store
    attributes: list[str] = []
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        if isinstance(node, ast.Attribute):
            attributes.append(node.attr)
        node = node.func if isinstance(node, ast.Call) else node.value
    if not isinstance(node, ast.Name):
        return
    places = (*event.scopes, projection.machine.scope_modules.get(event.module.name, -1))
    value = next((found for scope in places if (found := store.get(scope, node.id)) is not None), None)
    for option in options_of(value) if value is not None else ():
        held = store.get(option.number, attributes[-1]) if isinstance(option, Instance) and attributes else None
        is_module = isinstance(option, Instance) and option.number in projection.machine.wrapped
        yield from (option,) if held is None or is_module else options_of(held)


def reaches_unread(projection: Projection, module: Instance | ExternalObject) -> bool:
    """Return whether a call that was not followed is given a module, or what is made of its parameters.

    It may do anything to them. The module's output is none of that: ``loss(model(x))``.
    """
    machine = projection.machine
    asked = [one.node for one in training_events(projection, *PARAMETERS) if one.receiver == module]
    calls = [node.func for node in asked if isinstance(node, ast.Call)]
    names = {last_name(function.value) for function in calls if isinstance(function, ast.Attribute)} - {""}
    for values in machine.handed.values():
        parts = (part for value in values for part in parts_of_module(machine, value))
        if any(isinstance(part, (Instance, ExternalObject)) and part.number == module.number for part in parts):
            return True
    for call, inside in machine.unread.items():
        given = [*call.args, *(one.value for one in call.keywords)] if isinstance(call, ast.Call) else []
        for node in (one for part in given for one in origins_of(part, inside.body_around(call))):
            around = inside.parents.get(node)
            if not (isinstance(around, ast.Call) and around.func is node) and last_name(node) in names:
                return True
    return False


def training_events(projection: Projection, *names: str) -> Iterator[Event]:
    """Yield recorded calls of some names that the script comes to."""
    return (event for event in projection.in_course("call", "training") if event.name in names)


def training_forwards(projection: Projection, wrap: int) -> list[Event]:
    """Return the forwards through a DDP object that record gradients."""
    return [
        event
        for event in projection.in_course("ddp-forward")
        if event.gradients and isinstance(event.receiver, ExternalObject) and event.receiver.number == wrap
    ]


def averages_by_hand(script: Script) -> bool:
    """Return whether a script averages gradients or parameters itself: by a collective beside them, or by a name.

    A function that nothing calls or passes on, as in a file of helpers, averages nothing. A method that Python itself
    calls is used by no name: the walk comes to those that it follows, and others may run.
    """
    by_call = _BRINGING_TOGETHER | _REDUCING_IN_PARTS
    if not (uses_part(script, (*_AVERAGERS, "all_gather")) or calls_any(script, by_call)):
        return False
    for module in script.modules:
        for function in _averages(module):
            name = function.name if function is not None else ""
            if name in _FOLLOWED and function in whole_projection(script).machine.visited:
                return True
            used = not name or name.startswith("__") or any(name in one.words for one in script.modules)
            if name not in _FOLLOWED and used:
                return True
    return False


@all_once
def _averages(module: Module) -> Iterator[ast.FunctionDef | None]:
    """Yield the functions that average gradients; None for what runs with the module."""
    for name, calls in module.calls_by_name.items():
        for call in calls:
            if name in _COLLECTIVE_NAMES and _reduces_gradients(module, call):
                found = True
            elif name in _BRINGING_TOGETHER or name == "all_gather":
                found = _hands_on(module, call, _WEIGHTS)
            else:
                found = any(word in name for word in _AVERAGERS[2:])
            if found:
                yield next((one for one in module.ancestors(call) if isinstance(one, ast.FunctionDef)), None)


def _reduces_gradients(module: Module, call: ast.Call) -> bool:
    """Return whether a collective is one of gradients, by the words around it or as its tensors come from ``.grad``."""
    lines = " ".join(module.lines[call.lineno - 1 : call.end_lineno])
    own = ast.unparse(call) if "grad" in lines or "parameters" in lines else ""
    text = f"{own} {_loop_text(module, call)}"
    if any(word in text for word in _GRADIENT_WORDS):
        return True
    return _hands_on(module, call, _GRADIENTS)


def _hands_on(module: Module, call: ast.Call, wanted: frozenset[str], is_outer: bool = False) -> bool:
    """Return whether an argument of a call comes from an attribute; of a function that hands on what it is given, its
    own calls are asked.
    """
    body = module.body_around(call)
    given: list[ast.AST] = [*call.args, *(entry.value for entry in call.keywords)]
    names = {node.id for argument in given for node in descend(argument) if isinstance(node, ast.Name)}
    loops = (around for around in module.ancestors(call) if isinstance(around, ast.For))
    given += [
        loop.iter for loop in loops if names & {node.id for node in descend(loop.target) if isinstance(node, ast.Name)}
    ]
    sources = [node for argument in given for node in made_from(argument, body)]
    if any(isinstance(node, ast.Attribute) and node.attr in wanted for node in sources):
        return True
    if is_outer or not isinstance(body, ast.FunctionDef) or names.isdisjoint(parameters_of(body)):
        return False
    return any(_hands_on(module, outer, wanted, is_outer=True) for outer in module.calls_by_name.get(body.name, ()))


def _loop_text(module: Module, node: ast.AST) -> str:
    """Return the heads of the loops and the text of the function around a call, without its nested functions."""
    for around in module.ancestors(node):
        if isinstance(around, (ast.For, ast.ListComp, ast.GeneratorExp)):
            return ast.unparse(around.iter if isinstance(around, ast.For) else around)
        if isinstance(around, ast.FunctionDef):
            return around.name
    return ""


def innermost_loop(event: Event) -> ast.AST | None:
    """Return the statement of the innermost loop around an event that makes more than one turn."""
    return next((loop.node for loop in reversed(event.loops) if not loop.once), None)


def loop_nodes(event: Event) -> list[ast.AST]:
    """Return the statements of the loops around an event that make more than one turn, outermost first."""
    return [loop.node for loop in event.loops if not loop.once]


def is_prefix(one: Iterable[object], other: Iterable[object]) -> bool:
    """Return whether a sequence begins with another, compared by equality; of trees that is identity."""
    shorter, longer = list(one), list(other)
    return longer[: len(shorter)] == shorter


# The optimizers of a script: where they are made, what they hold, and where they step.

_NO_OPTIMIZERS = ("lr_scheduler", "swa_utils")


def is_optimizer(value: Value) -> bool:
    """Return whether a value is an optimizer of torch."""
    return isinstance(value, ExternalObject) and _is_optimizer_name(value.name)


def is_training_state(value: Value) -> bool:
    """Return whether a value is an optimizer, a learning-rate scheduler or a gradient scaler."""
    return isinstance(value, ExternalObject) and (
        value.name.startswith("torch.optim.") or value.name.endswith(".GradScaler")
    )


def has_no_tensors(value: Value) -> bool:
    """Return whether a value is an object whose state is of plain numbers: a learning-rate scheduler or a scaler."""
    return isinstance(value, ExternalObject) and (
        value.name.startswith("torch.optim.lr_scheduler.") or value.name.endswith(".GradScaler")
    )


def optimizers(projection: Projection) -> Iterator[Event]:
    """Yield every construction of an optimizer of torch that the script comes to."""
    return (event for event in projection.in_course("object") if _is_optimizer_name(event.name))


def steps(projection: Projection) -> list[Event]:
    """Return every call of ``optimizer.step()`` or ``scaler.step(optimizer)`` of an optimizer that is known."""
    return [event for event in training_events(projection, "step") if stepped(event)]


def stepped(event: Event) -> frozenset[int]:
    """Return the numbers of the optimizers that a call of ``step`` moves."""
    candidates = [event.receiver, *event.positional]
    return frozenset(
        option.number
        for value in candidates
        if value is not None
        for option in options_of(value)
        if isinstance(option, ExternalObject) and is_optimizer(option)
    )


def holders(projection: Projection, optimizer: Event) -> list[Value]:
    """Return the models with ``parameters()`` in an optimizer's arguments, or in their variables."""
    asked = {
        event.node: event.receiver
        for event in training_events(projection, *PARAMETERS)
        if event.receiver is not None and event.ordinal < optimizer.ordinal
    }
    body = optimizer.module.body_around(optimizer.node)
    return [receiver for node in origins_of(optimizer.node, body) if (receiver := asked.get(node)) is not None]


def misplaced_optimizers(projection: Projection) -> Iterator[Verdict]:
    """Yield optimizers made anew in every step, and optimizers whose model gets new modules afterwards."""
    made_steps = steps(projection)
    for optimizer in optimizers(projection):
        held = holders(projection, optimizer)
        dead = bool(made_steps) and not any(optimizer.ordinal in stepped(one) for one in made_steps)
        if not held or dead:
            continue
        loop = innermost_loop(optimizer)
        own = (one for one in made_steps if optimizer.ordinal in stepped(one) and innermost_loop(one) is loop)
        step = next(own, None) if loop is not None else None
        # One that is made under a condition may keep that of the step before.
        if step is not None and not _made_in(projection, held, loop) and not optimizer.conditions:
            yield _misplaced(
                optimizer,
                "a new {} is created for every step, so its state is lost each time",
                "Build the optimizer once, before the loop.",
                ("its only step", step.location),
            )
            continue
        sharding = _sharding(projection, optimizer, held)
        if sharding is not None:
            yield _misplaced(
                optimizer,
                "this {} holds the parameters from before the model was sharded, which replaces them",
                "Build the optimizer after the model is sharded, which replaces its parameters.",
                ("it is sharded here", sharding.location),
            )
            continue
        replaced = _replacement(projection, optimizer, held)
        if replaced is not None:
            yield _misplaced(
                optimizer,
                "this {} holds the parameters from before one of the model's layers was replaced",
                "Build the optimizer after the last change of the model.",
                ("the new layer, which it does not hold", replaced.location),
            )


def _misplaced(optimizer: Event, sentence: str, remedy: str, cause: Reason) -> Verdict:
    name = optimizer.name.rpartition(".")[2]
    return Verdict(sentence=sentence.format(name), remedy=remedy, locations=optimizer.location, because=(cause,))


def _is_optimizer_name(name: str) -> bool:
    return name.startswith("torch.optim.") and not any(word in name for word in _NO_OPTIMIZERS)


def _made_in(projection: Projection, held: list[Value], loop: ast.AST | None) -> bool:
    """Return whether a model that an optimizer holds is made in the same loop, or at an unknown place."""
    for value in held:
        for option in options_of(value):
            if isinstance(option, ExternalObject):
                made = projection.machine.object(option)
                if made is None or loop in loop_nodes(made):
                    return True
            elif not isinstance(option, Instance) or _constructed_in(projection, option, loop):
                return True
    return False


def _constructed_in(projection: Projection, instance: Instance, loop: ast.AST | None) -> bool:
    for key, number in projection.machine.objects.items():
        if number == instance.number and isinstance(key[0], ast.AST):
            return loop is not None and any(node is key[0] for node in descend(loop))
    return True


def _sharding(projection: Projection, optimizer: Event, held: list[Value]) -> Event | None:
    """Return where the model that an optimizer holds is sharded after it was built, under the same conditions."""
    if any(training_events(projection, "add_param_group")):
        return None
    for event in training_events(projection, SHARDED):
        if event.ordinal < optimizer.ordinal or event.conditions != optimizer.conditions or event.receiver is None:
            continue
        parts = [event.receiver, *parts_of_module(projection.machine, event.receiver)]
        if all(one in parts for one in held):
            return event
    return None


def _replacement(projection: Projection, optimizer: Event, held: list[Value]) -> Event | None:
    """Return an assignment of a new module to a model that an optimizer holds and gets no new parameters of."""
    if any(training_events(projection, "add_param_group")):
        return None
    for event in training_events(projection, "set attribute"):
        if event.ordinal <= optimizer.ordinal or event.receiver not in held or event.conditions != optimizer.conditions:
            continue
        value = event.positional[0]
        later = value.name if isinstance(value, ExternalObject) and value.number > optimizer.ordinal else ""
        if later.startswith("torch.nn.") and HAS_PARAMETERS.search(later) is not None:
            return event
    return None
