"""The ranks compute another gradient than one process would on the same samples.

What it finds
    A rehearsal in which the optimizers of the ranks get other gradients than those of one process that is given the
    samples of all ranks: a multiple of them, for all parameters or for some; other shares of the ranks' samples; a loss
    that one rank computes otherwise; gradients that are cut at a gather, clipped or stepped with before they are
    averaged; shards that each rank scales by a number of its own. In the source: a loss that is divided by a count
    which was added up over all ranks, and that no number of ranks multiplies; a schedule of the learning rate whose
    length is that of a divided loader times the number of ranks, or divided by it once more.

Why it is bad
    DDP promises that training on N ranks is training on a batch N times as large. Where the gradient is another one,
    nothing fails: the learning rate is off by a factor, or what is minimised is not the loss that the script names, and
    results change with the number of ranks.

Example
    loss = total / tokens_of_this_rank      # the mean of means: a rank with few tokens counts as much as any other
    loss.backward()

Remedy
    Give DDP on each rank N times its part of the loss of the whole batch, which is the mean of the rank where all have
    as many samples: DDP averages over the ranks.

When it is wrong
    Where the difference is meant, as of a learning rate that is scaled elsewhere. What the comparison cannot explain,
    and what differs by design (negatives of the own rank, statistics of batch norms), is not reported.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import lru_cache

import msgspec

from ddpdoctor.check import Check, RunRecord, Script, Verdict
from ddpdoctor.checks.collectives.sum_as_mean import argument_name
from ddpdoctor.equivalence_section import COUNTED_TWICE
from ddpdoctor.finding import Finding, Location, Refuted, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import NO_SYNC, NONE
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.divergence import function_around, nodes_of
from ddpdoctor.source.queries.origins import given_for, methods_of, pairs_of
from ddpdoctor.source.queries.wrapped_models import averages_by_hand, wrap_numbers
from ddpdoctor.source.ranks.ranks import size_names
from ddpdoctor.source.script.module import Module, children_of, descend, functions_named, last_name
from ddpdoctor.source.script.script import uses_any, uses_part

CHECK = Check(
    code="DDP223",
    name="unlike-one-process",
    severity=dict.fromkeys(("source", "rehearsal"), Severity.WARNING),
    needs=frozenset({"equivalence"}),
    subjects=("wrap", "loss"),
    triggers=("reduce", "gather", "schedule"),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report losses that are divided by a count of all ranks before DDP averages their gradients, and schedules of the
    learning rate that count other steps than those that they make.
    """
    yield from CHECK.suspected(divided_losses(whole_projection(script)), COUNTED_TWICE)
    if uses_part(script, ("schedule",)):
        from ddpdoctor.checks.gradients.schedule_length_source import other_lengths

        yield from CHECK.suspected(other_lengths(whole_projection(script)))


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report how the gradients differ."""
    from ddpdoctor.diagnosis.training.equivalence import LEAST_UNEVEN
    from ddpdoctor.diagnosis.training.equivalence_words import difference, remedy
    from ddpdoctor.diagnosis.wording import site_location

    backwards = (site_location(record.site(one.site)) for one in record.backwards if one.rank == 0)
    backward = next((place for place in backwards if place is not None), None)
    for section in record.equivalence:
        if section.status == "equal":
            for _, file, line in section.places:
                yield Refuted(location=Location(file=file, line=line), reason="the gradients are those of one process")
        if section.status != "differs":
            continue
        places = tuple(Location(file=file, line=line) for _, file, line in section.places if file)
        text = (
            f"{section.equal} of {section.parameters} parameters have the gradient of "
            f"{f'`{section.against}`' if section.against else 'one process'} in "
            f"{section.steps} optimizer steps; the others differ by up to {section.within:.0%} of it"
        )
        numbers = {"equal": section.equal, "parameters": section.parameters, "within": section.within}
        shares = list(zip(section.weights, section.due, strict=True))
        little = shares and all(abs(one - due) <= LEAST_UNEVEN * one for one, due in shares)
        yield CHECK.finding(
            difference(section),
            basis="rehearsal",
            remedy=remedy(section),
            ranks=section.at,
            locations=places or ((backward,) if backward is not None else ()),
            because=(text, None, numbers),
            severity=Severity.ADVICE if little else None,
        )


MOST_NODES = 5_000
"""That are followed from one backward."""
# They sum or scale the gradients in place of the mean: of DDP's hooks, and of FSDP.
_OTHER_MEANS = ("register_comm_hook", "set_gradient_divide_factor", "set_reduce_scatter_divide_factor")
# Functions whose results grow with what they are given.
_LINEAR = frozenset({"sum", "stack", "mean", "cat", "values", "tensor", "as_tensor"})
_COUNTS = frozenset({"sum", "len", "numel", "count_nonzero", "size"})
_GATHERS = frozenset({"gather", "all_gather", "all_gather_into_tensor", "gather_for_metrics"})


def divided_losses(projection: Projection) -> Iterator[Verdict]:
    """Yield the divisions on the way to a backward through DDP, where no number of ranks is on that way."""
    script = projection.machine.script
    reductions = [event for event in projection.in_course("collective") if _adds_up(event)]
    if (
        not reductions
        or uses_any(script, _OTHER_MEANS)
        or averages_by_hand(script)
        or _scales_gradients(script.modules)
    ):
        return
    seen: set[Location] = set()
    for backward in projection.in_course("backward"):
        if not wrap_numbers(backward.receiver) or any(context.value == NO_SYNC for context in backward.contexts):
            continue
        before = [event for event in reductions if event.ordinal < backward.ordinal]
        for found in Followed(projection, before).from_backward(backward):
            if found.places[0] not in seen:
                seen.add(found.places[0])
                yield found


def _adds_up(event: Event) -> bool:
    """Return whether a collective hands every rank the sum, or what it is made of, of all ranks."""
    if event.name in _GATHERS:
        return "group" not in event.named
    operations = (event.argument("op", 1), event.argument("group", 2))
    told = [str(getattr(one, "name", "")) for one in operations if one not in (None, NONE)]
    return event.name == "all_reduce" and all(one.endswith((".SUM", ".WORLD")) for one in told)


def _scales_gradients(modules: Sequence[Module]) -> bool:
    """Return whether anything multiplies a ``.grad``, as to undo DDP's mean."""
    changed = (node.target for module in modules for node in module.index.of(ast.AugAssign))
    called = (
        node.func.value
        for module in modules
        for name in ("mul_", "div_")
        for node in module.calls_by_name.get(name, ())
        if isinstance(node.func, ast.Attribute)
    )
    return any(
        isinstance(inner, ast.Attribute) and inner.attr == "grad"
        for node in (*changed, *called)
        for inner in descend(node)
    )


class Part(msgspec.Struct, frozen=True, eq=False):
    """An expression, and the function that it stands in."""

    module: Module
    function: ast.AST
    node: ast.expr


def _divided(part: Part, divisor: ast.expr, reduction: Event, backward: Event) -> Verdict:
    count = part.module.excerpt(divisor, 40)
    return Verdict(
        sentence=f"the loss is divided by `{count}`, a count of all ranks, and DDP averages over the ranks on top",
        locations=(part.module.location(part.node), reduction.location),
        because=(
            ("the count is added up over the ranks here", reduction.location),
            ("this backward averages the gradients, which are then 1/N of those of one process", backward),
        ),
    )


class Followed:
    """What the loss of a backward is computed from."""

    def __init__(self, projection: Projection, reductions: list[Event]) -> None:
        self._modules = projection.machine.script.modules
        self._sizes = size_names(projection.machine.store)
        self._reductions = reductions

    def from_backward(self, backward: Event) -> Iterator[Verdict]:
        """Yield the divisions of a backward's loss by counts of all ranks."""
        call = backward.node
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            return
        function = function_around(backward.module, call)
        starts = [Part(backward.module, function, one) for one in (call.func.value, *call.args)]
        found = [
            _divided(part, divisor, reduction, backward)
            for start in starts
            for part in self.along(start)
            for divisor in divisors(part.node)
            if (reduction := self.reduction(Part(part.module, part.function, divisor))) is not None
        ]
        # Everything that the loss is made of is read last: it is 60 times as much as what grows with it.
        whole = [part for start in starts if found for part in self.all(start)]
        if not self._is_of_size(whole) and not any(map(_gathers_with_gradients, whole)):
            yield from found

    def _is_of_size(self, parts: list[Part]) -> bool:
        """Return whether a number of ranks takes part, or not everything was followed."""
        return len(parts) >= MOST_NODES or any(last_name(part.node) in self._sizes for part in parts)

    def reduction(self, divisor: Part) -> Event | None:
        """Return the collective that adds a divisor up over the ranks, where it is a count and no number of ranks."""
        parts = list(self.all(divisor))
        if self._is_of_size(parts) or not any(
            isinstance(part.node, ast.Call) and last_name(part.node.func) in _COUNTS for part in parts
        ):
            return None
        for part in parts:
            for event in self._reductions:
                around = event.module is part.module and function_around(event.module, event.node) is part.function
                name = argument_name(event) if around else ""
                if event.node is part.node or (name and ast.unparse(part.node) == name):
                    return event
        return None

    def all(self, start: Part) -> Iterator[Part]:
        """Yield every expression that one is made of."""
        waiting = [start]
        seen: set[ast.AST] = set()
        while waiting and len(seen) < MOST_NODES:
            part = waiting.pop()
            if part.node in seen:
                continue
            seen.add(part.node)
            yield part
            behind = list(self._behind(part))
            # What a function of the project is given comes in by its parameters, where it uses them.
            inside = part.node.func if isinstance(part.node, ast.Call) and behind else part.node
            waiting += [Part(part.module, part.function, one) for one in _expressions_in(inside)] + behind

    def along(self, start: Part) -> Iterator[Part]:
        """Yield the expressions that grow with the loss: what a loss function is given does not."""
        waiting = [start]
        seen: set[ast.AST] = set()
        while waiting and len(seen) < MOST_NODES:
            part = waiting.pop()
            node = part.node
            if node in seen:
                continue
            seen.add(node)
            yield part
            inner: list[ast.expr] = []
            if isinstance(node, ast.BinOp):
                inner = [node.left] if isinstance(node.op, ast.Div) else [node.left, node.right]
            elif isinstance(node, (ast.IfExp, ast.Subscript)):
                inner = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node.value]
            elif isinstance(node, (ast.Tuple, ast.List)):
                inner = node.elts
            elif isinstance(node, ast.Dict):
                inner = node.values
            elif isinstance(node, (ast.GeneratorExp, ast.ListComp)):
                inner = [node.elt, *(one.iter for one in node.generators)]
            elif isinstance(node, ast.Call):
                inner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
                inner += node.args if last_name(node.func) in _LINEAR else []
            waiting += [Part(part.module, part.function, one) for one in inner]
            waiting += self._behind(part)

    def _behind(self, part: Part) -> Iterator[Part]:
        """Yield what a variable was set to before, what the callers give for it, and what a function returns."""
        node = part.node
        if isinstance(node, ast.Call):
            yield from self._returned(node)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            text, found = ast.unparse(node), False
            for value in _set_before(part, text):
                found = True
                yield Part(part.module, part.function, value)
            if isinstance(node, ast.Attribute) and not found:
                yield from self._held(node)
            if isinstance(node, ast.Name) and isinstance(part.function, ast.FunctionDef) and not found:
                for module, call, given in given_for(self._modules, part.function, text):
                    yield Part(module, function_around(module, call), given)

    def _held(self, attribute: ast.Attribute) -> Iterator[Part]:
        for module in self._modules:
            for statement in module.index.of(ast.Assign):
                if any(isinstance(one, ast.Attribute) and one.attr == attribute.attr for one in statement.targets):
                    yield Part(module, function_around(module, statement), statement.value)
            for added in module.index.of(ast.AugAssign):
                if isinstance(added.target, ast.Attribute) and added.target.attr == attribute.attr:
                    yield Part(module, function_around(module, added), added.value)

    def _returned(self, call: ast.Call) -> Iterator[Part]:
        """Yield what the project's function of this name returns, or the forward of what the name was set to."""
        name = last_name(call.func)
        homes = functions_named(self._modules, name)
        if not homes:
            made = {
                last_name(statement.value.func)
                for module in self._modules
                for statement in module.index.of(ast.Assign)
                if isinstance(statement.value, ast.Call) and any(last_name(one) == name for one in statement.targets)
            }
            homes = list(methods_of(self._modules, made, ("forward", "__call__")))
        for module, function in homes:
            for node in nodes_of(function):
                if isinstance(node, ast.Return) and node.value is not None:
                    yield Part(module, function, node.value)


def _set_before(part: Part, name: str) -> Iterator[ast.expr]:
    """Yield what a variable may have been set to, and changed by, when an expression of its function is reached."""
    around = set(map(id, part.module.ancestors(part.node)))
    line = getattr(part.node, "lineno", 0)
    for statement in _backwards(part.function):
        if statement.lineno > line:
            continue
        if id(statement) in around and not isinstance(statement, ast.AugAssign):
            continue
        if isinstance(statement, ast.Assign):
            values = [value for target, value in pairs_of(statement) if name in _names(target)]
            yield from values
            whole = any(ast.unparse(target) == name for target, _ in pairs_of(statement))
            if whole and id(part.module.parents.get(statement)) in around:
                return
        elif isinstance(statement, ast.AugAssign) and ast.unparse(statement.target) == name:
            made = ast.BinOp(statement.target, statement.op, statement.value)
            yield ast.copy_location(made, statement)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            function = statement.value.func
            if isinstance(function, ast.Attribute) and ast.unparse(function.value) == name:
                yield from statement.value.args


@lru_cache(maxsize=64)
def _backwards(function: ast.AST) -> tuple[ast.stmt, ...]:
    """Return the statements of a function, the last first."""
    statements = (node for node in nodes_of(function) if isinstance(node, ast.stmt))
    return tuple(sorted(statements, key=lambda one: -one.lineno))


def _expressions_in(node: ast.expr) -> Iterator[ast.expr]:
    for inner in children_of(node):
        if isinstance(inner, ast.expr):
            yield inner
        else:  # A keyword, or what a comprehension goes over.
            yield from (one for one in children_of(inner) if isinstance(one, ast.expr))


def _names(target: ast.expr) -> set[str]:
    """Return the variables that a target sets, or holds a part of."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return {name for one in target.elts for name in _names(one)}
    return {ast.unparse(target.value if isinstance(target, ast.Subscript) else target)}


def divisors(node: ast.expr) -> Iterator[ast.expr]:
    """Yield what an expression is divided by."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        yield node.right
    elif isinstance(node, ast.Call) and last_name(node.func) in ("div", "div_", "true_divide", "divide"):
        yield from node.args[-1:]


def _gathers_with_gradients(part: Part) -> bool:
    """Return whether a call may hand the loss samples of other ranks, or a reduction that autograd knows."""
    if not isinstance(part.node, ast.Call):
        return False
    name = part.module.resolve(part.node.func)
    # `apply` is that of an autograd function of the script's own.
    return name.startswith(("torch.distributed.nn", "torch.distributed._functional")) or (
        last_name(part.node.func) == "apply"
    )
