"""no_sync() is in the wrong place.

What it finds
    `no_sync()` around every training forward, or around the very micro-step after which the optimizer steps: the
    gradients are never averaged (error). `no_sync()` around the backward only: they are averaged nevertheless
    (warning). `model.require_backward_grad_sync = False` does what no_sync() does, and is read like it.

Why it is bad
    DDP decides in its forward whether the next backward synchronises. A step on gradients that were not averaged makes
    the ranks' weights drift apart, silently. Around backward alone the context does nothing: all the traffic that it
    should save is sent.

Example
    loss = model(batch)
    with model.no_sync():
        loss.backward()

Remedy
    Put forward and backward under no_sync() for all micro-steps but the last, which has to run outside of it.

When it is wrong
    Where parameters are averaged at intervals (local SGD) in a way that was not recognised.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html#torch.nn.parallel.DistributedDataParallel.no_sync
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ddpdoctor.check import AVERAGING, Check, RunRecord, Script
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.source.events import ContextAround, Event
from ddpdoctor.source.interpreter.values import NO_SYNC, options_of
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.job_kind import framework
from ddpdoctor.source.queries.wrapped_models import (
    averages_by_hand,
    ddp_objects,
    innermost_loop,
    steps,
    training_events,
    training_forwards,
    wrap_numbers,
)
from ddpdoctor.source.script.module import Module, descend, functions_named, last_name
from ddpdoctor.source.script.script import uses_part

CHECK = Check(
    code="DDP217",
    name="misplaced-no-sync",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=AVERAGING | {"collectives", "passes"},
    subjects=("wrap", "loss"),
    triggers=("no_sync", "require_backward_grad_sync"),
)
REMEDY = (
    "Disable synchronisation, by no_sync() around forward and backward or by require_backward_grad_sync, for all "
    "micro-steps but the last of each step."
)
TITLES = {
    "never-synchronised": "synchronisation is off in every training forward, so the gradients are never averaged",
    "last-unsynchronised": "synchronisation is off in the micro-step after which the optimizer steps, so its gradients "
    "are not averaged",
    "backward-only": "no_sync() around the backward alone has no effect: DDP decided in the forward to synchronise",
}


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report steps on gradients that no_sync kept from being averaged, and contexts that come too late."""
    from ddpdoctor.checks.gradients.steps_run import late_no_syncs
    from ddpdoctor.diagnosis.training.replicas import unaveraged

    for found in unaveraged(record):
        if found.why == "no-sync":
            title = TITLES["last-unsynchronised" if found.ever_synchronised else "never-synchronised"]
            sentence = f"{title}: they differ between ranks in {found.shown}"
            yield from CHECK.judged(record.job.kind, (found.verdict(sentence, REMEDY),))
    for location, number, wrap in late_no_syncs(record):
        model = wrap.module_class or "the model"
        text = f"{number} backwards of {model} under no_sync() were synchronised nevertheless"
        yield CHECK.finding(
            TITLES["backward-only"],
            basis=record.job.kind,
            remedy=REMEDY,
            locations=location,
            because=(text, None, {"backwards": number}),
            severity=Severity.WARNING,
        )


PERIOD = 4
"""Value that a divisor is tried with when it is no number."""
LARGEST_PERIOD = 64
MAXIMUM_DEPTH = 4
"""Variables that are followed to their assignment."""

Number = int | bool


def agree(module: Module, one: ast.expr, other: ast.expr) -> bool:
    """Return whether a test by a remainder certainly chooses all the turns that the ``other`` one chooses.

    The two must use the same counter and the same divisor; with anything else in them the answer is no.
    """
    one, other = _resolved(module, one), _resolved(module, other)
    unknown = _names(one) | _names(other)
    divisors = _divisors(one) | _divisors(other)
    if len(divisors) != 1:
        return False
    divisor = next(iter(divisors))
    counters = unknown - _names(ast.parse(divisor, mode="eval").body)
    period = int(divisor) if divisor.isdigit() else PERIOD
    if len(counters) != 1 or not 2 <= period <= LARGEST_PERIOD:
        return False
    counter = next(iter(counters))
    turns = range(3 * period)
    known: list[dict[str, int]] = [{counter: turn} for turn in turns]
    dividing = frozenset(
        inner
        for test in (one, other)
        for inner in descend(test)
        if isinstance(inner, ast.expr) and ast.unparse(inner) == divisor
    )
    chosen = [tuple(_evaluate(test, turn, period, dividing) for test in (one, other)) for turn in known]
    if any(first is None or second is None for first, second in chosen):
        return False
    steps = [first for first, second in chosen if second]
    return bool(steps) and len(steps) < len(turns) and all(steps)


def _evaluate(node: ast.expr, known: Mapping[str, int], period: int, dividing: frozenset[ast.AST]) -> Number | None:
    """Return the value of a test; ``dividing`` are the nodes that stand for the divisor, which is ``period``."""
    if node in dividing:
        return period
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = _evaluate(node.operand, known, period, dividing)
        return None if value is None else not value
    if isinstance(node, ast.BinOp):
        left, right = (_evaluate(side, known, period, dividing) for side in (node.left, node.right))
        return _arithmetic(node.op, left, right)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = (_evaluate(side, known, period, dividing) for side in (node.left, node.comparators[0]))
        return _compared(node.ops[0], left, right)
    return None


def _arithmetic(kind: ast.operator, left: Number | None, right: Number | None) -> Number | None:
    if left is None or right is None:
        return None
    if isinstance(kind, ast.Add):
        return left + right
    if isinstance(kind, ast.Sub):
        return left - right
    return left % right if isinstance(kind, ast.Mod) and right else None


def _compared(kind: ast.cmpop, left: Number | None, right: Number | None) -> bool | None:
    if left is None or right is None:
        return None
    if isinstance(kind, ast.Eq):
        return left == right
    if isinstance(kind, ast.NotEq):
        return left != right
    if isinstance(kind, (ast.Lt, ast.LtE)):
        return left < right if isinstance(kind, ast.Lt) else left <= right
    return None


def _divisors(node: ast.expr) -> set[str]:
    return {
        ast.unparse(inner.right)
        for inner in descend(node)
        if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Mod)
    }


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in descend(node) if isinstance(inner, ast.Name)}


def _resolved(module: Module, node: ast.expr) -> ast.expr:
    """Return a test with variables that are assigned once, from a test by a remainder, put in."""
    for _ in range(MAXIMUM_DEPTH):
        inner = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else node
        if not isinstance(inner, ast.Name):
            return node
        values = [entry.value for entry in module.assigning(module.tree, inner.id)]
        if len(values) != 1:
            return node
        node = ast.UnaryOp(ast.Not(), values[0]) if inner is not node else values[0]
    return node


ATTRIBUTE = "require_backward_grad_sync"
_ALWAYS, _NEVER = ast.Constant(True), ast.Constant(False)


def settings_of(projection: Projection, number: int) -> list[Event]:
    """Return the assignments to the attribute of a DDP object, in their order."""
    return [event for event in training_events(projection, f"set {ATTRIBUTE}") if number in ddp_objects(event.receiver)]


def always_off(script: Script, settings: Sequence[Event], forwards: Sequence[Event]) -> Event | None:
    """Return the only place that speaks of the attribute, if it assigns ``False`` unguarded before all forwards."""
    mentions = sum(node.attr == ATTRIBUTE for module in script.modules for node in module.index.of(ast.Attribute))
    if len(settings) != 1 or mentions != 1 or settings[0].undecided or test_around(settings[0]) is not None:
        return None
    before_all = all(settings[0].ordinal < forward.ordinal for forward in forwards)
    return settings[0] if before_all and _off_by(settings[0]) is _ALWAYS else None


def off_in_last_turn(settings: Sequence[Event], forward: Event, step: Event) -> Event | None:
    """Return an assignment that leaves synchronisation off in the forward of the turn in which the optimizer steps.

    DDP reads the attribute in its forward: what is assigned behind it holds from the next turn on.
    """
    loop, stepping = innermost_loop(forward), test_around(step)
    if not settings or stepping is None or any(innermost_loop(event) is not loop for event in settings):
        return None
    off = _off_when(settings)
    if off is None:
        return None
    module = forward.module
    if all(event.ordinal < forward.ordinal for event in settings):
        return settings[0] if agree(module, off, stepping) else None
    late = all(event.ordinal > forward.ordinal for event in settings)
    on = ast.UnaryOp(ast.Not(), off)
    return settings[0] if late and agree(module, on, stepping) and agree(module, stepping, on) else None


def late_in_own_loop(settings: Sequence[Event], forwards: Sequence[Event], step: Event) -> Event | None:
    """Return an assignment that turns synchronisation on in the last turn of a loop of micro-steps, behind its forward.

    The optimizer steps after the loop. The forward of the last turn has then read what the turn before assigned.
    """
    loop = innermost_loop(forwards[0])
    setting = next((event for event in settings if innermost_loop(event) is loop), None)
    if setting is None or len({event.node for event in settings}) > 1 or not isinstance(loop, ast.For):
        return None
    if any(event.ordinal > setting.ordinal for event in forwards) or loop not in setting.module.ancestors(setting.node):
        return None
    if innermost_loop(step) is loop or step.ordinal < setting.ordinal or loop in _loops(step):
        return None
    statement, turns = setting.module.parents.get(setting.node), loop.iter
    if not isinstance(statement, ast.Assign) or not isinstance(turns, ast.Call) or last_name(turns.func) != "range":
        return None
    value = _resolved(setting.module, statement.value)
    number = turns.args[0] if len(turns.args) == 1 else None
    if number is None or (isinstance(number, ast.Constant) and number.value == 1):
        return None
    in_last = f"{ast.unparse(loop.target)} == {ast.unparse(number)} - 1"
    return setting if ast.unparse(value) == in_last else None


def test_around(event: Event) -> ast.expr | None:
    """Return the condition of the innermost ``if`` around an event in its function and loop, inverted in ``else``."""
    below: ast.AST = event.node
    for around in event.module.ancestors(event.node):
        if isinstance(around, (ast.FunctionDef, ast.For, ast.While)):
            return None
        if isinstance(around, ast.If):
            return around.test if below in around.body else ast.UnaryOp(ast.Not(), around.test)
        below = around
    return None


def _off_when(settings: Sequence[Event]) -> ast.expr | None:
    """Return when synchronisation is off after some assignments; None when it is not that simple."""
    off: ast.expr = _NEVER
    for event in settings:
        new, test = _off_by(event), test_around(event)
        if new is None:
            return None
        if test is None:
            off = new
        elif new is _ALWAYS and off is _NEVER:
            off = test
        elif new is _NEVER and off is _ALWAYS:
            off = ast.UnaryOp(ast.Not(), test)
        elif new is not _NEVER or not (off is _NEVER or _excludes(test, off)):
            return None
    return off


def _off_by(event: Event) -> ast.expr | None:
    statement = event.module.parents.get(event.node)
    if not isinstance(statement, ast.Assign):
        return None
    value = statement.value
    if isinstance(value, ast.Constant):
        return _NEVER if value.value else _ALWAYS
    return ast.UnaryOp(ast.Not(), value)


def _excludes(one: ast.expr, other: ast.expr) -> bool:
    """Return whether a condition is the opposite of another, as those of an ``if`` and its ``else`` are."""
    return isinstance(one, ast.UnaryOp) and isinstance(one.op, ast.Not) and one.operand is other


# Local SGD: parameters are averaged now and then, and gradients stay unsynchronised by intent.
_OTHER_AVERAGING = ("PostLocalSGD", "PeriodicModelAverager", "average_parameters")


def _misplaced(mistake: str, backward: Event, context: ContextAround, step: Event | None = None) -> Finding:
    """Return the finding at a ``with`` item, or at the target of an assignment to the attribute that it sets.

    ``step`` uses the gradients, where the wrong micro-step is left out.
    """
    return CHECK.finding(
        TITLES[mistake],
        remedy=REMEDY,
        locations=context.module.location(context.node),
        because=(
            ("this is the backward", backward.location),
            *(() if step is None else (("this step uses its gradients", step.location),)),
        ),
        severity=Severity.WARNING if mistake == "backward-only" else None,
    )


def in_source(script: Script) -> Iterator[Finding]:
    """Report each no_sync that leaves gradients unaveraged or saves nothing."""
    projection = whole_projection(script)
    script = projection.machine.script
    if uses_part(script, _OTHER_AVERAGING) or framework(script) or averages_by_hand(script):
        return
    seen: set[ast.AST] = set()
    for backward in projection.in_course("backward"):
        numbers = wrap_numbers(backward.receiver)
        if len(numbers) != 1 or backward.node in seen:
            continue
        found = _judge(projection, backward, next(iter(numbers)))
        if found is not None:
            seen.add(backward.node)
            yield found


def _judge(projection: Projection, backward: Event, number: int) -> Finding | None:
    loop = innermost_loop(backward)
    forwards = training_forwards(projection, number)
    near = [event for event in forwards if innermost_loop(event) is loop]
    if not near or not forwards:
        return None
    moves = [step for step in steps(projection) if loop is None or innermost_loop(step) is loop or loop in _loops(step)]
    around_forward = [context for event in forwards if (context := _certain(event)) is not None]
    if moves and len(around_forward) == len(forwards):
        return _misplaced("never-synchronised", backward, around_forward[0])
    settings = settings_of(projection, number)
    switched = always_off(projection.machine.script, settings, forwards) if moves else None
    if switched is not None:
        return _misplaced("never-synchronised", backward, _place_of(switched))
    around_backward = _possible(backward)
    if around_backward is not None and not any(_possible(event) for event in near):
        return _misplaced("backward-only", backward, around_backward)
    for step in moves:
        wrong = off_in_last_turn(settings, near[0], step) if innermost_loop(step) is loop else None
        if wrong is not None:
            return _misplaced("last-unsynchronised", backward, _place_of(wrong), step)
    for step in steps(projection) if settings else ():
        wrong = late_in_own_loop(settings, near, step)
        if wrong is not None:
            return _misplaced("last-unsynchronised", backward, _place_of(wrong), step)
    return _wrong_turn(projection.machine.script.modules, backward, near, moves)


def _place_of(setting: Event) -> ContextAround:
    """Return an assignment that does what the context does."""
    assert isinstance(setting.node, ast.expr)
    return ContextAround(setting.node, setting.module, NO_SYNC)


def _loops(event: Event) -> list[ast.AST]:
    return [loop.node for loop in event.loops]


def _certain(event: Event) -> ContextAround | None:
    return next((context for context in event.contexts if context.value == NO_SYNC), None)


def _possible(event: Event) -> ContextAround | None:
    return next((context for context in event.contexts if NO_SYNC in options_of(context.value)), None)


def _wrong_turn(
    modules: Sequence[Module], backward: Event, forwards: list[Event], moves: list[Event]
) -> Finding | None:
    """Return a ``no_sync`` entered in the very turn in which the optimizer steps."""
    for step in moves:
        stepping = test_around(step)
        if stepping is None or innermost_loop(step) is not innermost_loop(backward):
            continue
        for forward in forwards:
            context = _possible(forward)
            if context is None:
                continue
            entering = _condition_of_no_sync(modules, forward, context)
            if entering is not None and agree(forward.module, entering, stepping):
                return _misplaced("last-unsynchronised", backward, context, step)
    return None


def _condition_of_no_sync(modules: Sequence[Module], forward: Event, context: ContextAround) -> ast.expr | None:
    """Return the condition under which a ``with`` item of the forward's function is ``no_sync()``."""
    node: ast.expr | None = context.node
    module = context.module
    name = node.func if isinstance(node, ast.Call) else node
    if isinstance(name, ast.Name):  # ``context = no_sync() if … else nullcontext()``, or uncalled until it is entered.
        node = _only_assignment(module, name.id) or node
    if isinstance(node, ast.Call) and not _is_no_sync(node):
        node = _chosen_inside(modules, node)
    if isinstance(node, ast.IfExp):
        if _is_no_sync(node.body) and not _is_no_sync(node.orelse):
            return node.test
        if _is_no_sync(node.orelse) and not _is_no_sync(node.body):
            return ast.UnaryOp(ast.Not(), node.test)
    elif node is not None and _is_no_sync(node):
        return test_around(msgspec.structs.replace(forward, node=node, module=module))
    return None


def _chosen_inside(modules: Sequence[Module], call: ast.Call) -> ast.expr | None:
    """Return the choice that the only function of a name makes between two results, in the caller's words."""
    homes = functions_named(modules, last_name(call.func))
    if len(homes) != 1 or any(isinstance(one, ast.Starred) for one in call.args):
        return None
    function = homes[0][1]
    body = [one for one in function.body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
    made: ast.expr | None = None
    for statement in reversed(body):
        taken = statement.body[-1] if isinstance(statement, ast.If) and len(statement.body) == 1 else statement
        value = taken.value if isinstance(taken, ast.Return) else None
        if isinstance(statement, ast.If) and value is not None:
            other = statement.orelse[0] if len(statement.orelse) == 1 else None
            rest = other.value if isinstance(other, ast.Return) else made
            made = ast.IfExp(statement.test, value, rest) if rest is not None else None
        elif value is not None:
            made = value
        else:
            return None
    names = [one.arg for one in function.args.args]
    if isinstance(call.func, ast.Attribute) and names[:1] in (["self"], ["cls"]):
        names = names[1:]
    given = {**dict(zip(names, call.args, strict=False)), **{word.arg or "": word.value for word in call.keywords}}
    return None if made is None else _Renamed(given).visit(copy.deepcopy(made))


class _Renamed(ast.NodeTransformer):
    """Puts what a call gives in the place of parameters."""

    def __init__(self, given: Mapping[str, ast.expr]) -> None:
        self._given = given

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return what stands for a name."""
        return self._given.get(node.id, node)


def _only_assignment(module: Module, name: str) -> ast.expr | None:
    """Return the only value assigned to a name that may be ``no_sync``."""
    made = [one.value for one in module.assigning(module.tree, name)]
    values = [one for one in made if any(map(_is_no_sync, descend(one)))] or made
    return values[0] if len(values) == 1 else None


def _is_no_sync(node: ast.AST) -> bool:
    method = node.func if isinstance(node, ast.Call) else node
    return isinstance(method, ast.Attribute) and method.attr == "no_sync"
