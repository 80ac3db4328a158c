"""A sum over the ranks is shown as if it were their mean.

What it finds
    A number that is all-reduced with SUM (the default), then printed or logged as a loss, an accuracy or a mean (by its
    own name or the text beside it), without any division, in the same function or in callers that receive it.
    Also two tensors that are both summed and then compared item by item, as predicted and true classes are. In a
    rehearsal: a running total that is summed over the ranks in place, added to, and summed again. And one tensor that
    is summed twice with no change in between: a dict holds it under two keys.

Why it is bad
    The number grows with the number of ranks: the loss of 8 ranks looks eight times as bad as that of one, an accuracy
    goes above 100%, and runs of different sizes cannot be compared. Sums of the ranks' class numbers are not classes:
    whether they are equal says nothing about any sample. What a total holds of earlier sums is summed again and again:
    it is multiplied by the number of ranks each time.

Example
    dist.all_reduce(loss)
    print(f"loss {loss.item():.3f}")

Remedy
    Divide by dist.get_world_size(), or pass op=dist.ReduceOp.AVG (NCCL). With different numbers of samples per rank,
    reduce sum and count and divide them. Of classes, compare them on each rank, then sum how many are right. Reduce a
    running total once, after the loop that adds to it, or a copy of it.

When it is wrong
    If the sum is intended; a name such as total_loss indicates that.

References
    https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.ReduceOp
"""

from __future__ import annotations

import ast
from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from ddpdoctor.check import Check, RunRecord, Script, Verdict
from ddpdoctor.checks.collectives.summed_twice_source import REMEDY, sums_of_one_tensor
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import External, constant, tags_of
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.divergence import function_around, mentions, nodes_of, stores
from ddpdoctor.source.queries.shown_numbers import SHOWS, followers, is_number_of, number_kind
from ddpdoctor.source.ranks.ranks import size_names
from ddpdoctor.source.script.module import Module, descend, last_name

if TYPE_CHECKING:
    from ddpdoctor.record.streams.collectives import SummedTotal

CHECK = Check(
    code="DDP317",
    name="sum-as-mean",
    severity=dict.fromkeys(("source", "rehearsal"), Severity.WARNING),
    needs=frozenset({"summed_totals"}),
    subjects=("collectives",),
    triggers=("reduce",),
)
GROWN = 3
"""Sums in a row that take in the one before: numbers that are set anew would have to double on every rank each time."""


def in_source(script: Script) -> Iterator[Finding]:
    """Report means that are summed over the ranks and shown."""
    yield from shown_sums(whole_projection(script))
    yield from CHECK.suspected(sums_of_one_tensor(whole_projection(script)))
    for event, compared in compared_sums(whole_projection(script)):
        place = event.module.location(compared)
        yield CHECK.finding(
            f"`{event.module.excerpt(compared, 60)}` compares sums over the ranks, which are not labels",
            remedy="Compare on every rank, then all-reduce the number of samples that are right, and that of all.",
            locations=(event.location, place),
            because=("both sides were summed over the ranks before", place),
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report totals that hold what was summed over the ranks before, and are summed again."""
    yield from CHECK.judged(record.job.kind, sums_again(record))


def sums_again(record: RunRecord) -> Iterator[Verdict]:
    """Yield each line that sums such totals, with what it did to the first of them."""
    from ddpdoctor.diagnosis.wording import site_location

    ranks = record.rank_numbers()
    yield from _summed_twice(record, ranks)
    given: dict[tuple[int, int], dict[int, list[SummedTotal]]] = {}
    for row in record.summed_totals:
        given.setdefault((row.site, row.tensor), {}).setdefault(row.rank, []).append(row)
    by_site: dict[int, list[tuple[bool, dict[int, list[SummedTotal]]]]] = {}
    for (site, _), by_rank in given.items():
        count = min(map(len, by_rank.values()))
        if by_rank.keys() == set(ranks) and count > 1:
            rows = [[by_rank[rank][at].numbers for rank in ranks] for at in range(count)]
            grown = all(_takes_in(before, after) for before, after in pairwise(rows))
            by_site.setdefault(site, []).append((grown, by_rank))
    for site, totals in by_site.items():
        sums = sum(min(map(len, by_rank.values())) - 1 for _, by_rank in totals)
        if len(ranks) < 2 or sums < GROWN or not all(grown for grown, _ in totals):
            continue
        by_rank, place = totals[0][1], site_location(record.site(site))
        shown = "; ".join(
            f"rank {rank} gave {', '.join(f'{row.numbers[0]:,.6g}' for row in by_rank[rank][:4])}" for rank in ranks[:2]
        )
        yield Verdict(
            sentence="a running total is summed over the ranks in place and then added to: the next sum takes in on "
            "every rank what was summed before, and multiplies it by the number of ranks",
            remedy="Sum it over the ranks once, after the loop that adds to it; or sum a copy: "
            "total = running.clone(); dist.all_reduce(total).",
            locations=place,
            ranks=ranks,
            because=((f"in turn {shown}", place, {"sums": sums, "ranks": len(ranks)}),),
        )


def _summed_twice(record: RunRecord, ranks: tuple[int, ...]) -> Iterator[Verdict]:
    """Yield each line that sums what one call of the same step has summed in its group, with no change in between.

    Numbers that are summed again in every step, and that nothing adds to, are there to meet the others.
    """
    from ddpdoctor.diagnosis.wording import site_location

    steps_ns = {rank: [step.time_ns for step in record.optimizer_steps if step.rank == rank] for rank in ranks}
    alike: dict[tuple[int, ...], list[SummedTotal]] = {}
    for row in record.summed_totals:
        if row.version >= 0:
            step = bisect(steps_ns[row.rank], row.time_ns)
            alike.setdefault((row.rank, row.tensor, row.version, step, len(row.numbers)), []).append(row)
    pairs: dict[int, list[tuple[SummedTotal, SummedTotal]]] = {rank: [] for rank in ranks}
    for rows in alike.values():
        # More of them are a warm-up or a measurement; two groups may be two levels of a mesh.
        if len(rows) == 2 and rows[0].own_group == rows[1].own_group:
            pairs[rows[0].rank].append((rows[0], rows[1]))
    by_lines: dict[tuple[int, int], list[tuple[tuple[SummedTotal, SummedTotal], ...]]] = {}
    for each in zip(*pairs.values(), strict=False) if len(ranks) > 1 else ():
        sums = [sum(numbers) for numbers in zip(*(before.numbers for before, _ in each), strict=False)]
        held = (
            abs(now - one) <= 1e-4 * abs(one) for _, row in each for now, one in zip(row.numbers, sums, strict=False)
        )
        if any(sums) and all(held) and len({(before.site, row.site) for before, row in each}) == 1:
            by_lines.setdefault((each[0][0].site, each[0][1].site), []).append(each)
    for (first, second), times in by_lines.items():
        shown = "; ".join(
            f"rank {row.rank} gave {before.numbers[0]:,.6g}, then the sum {row.numbers[0]:,.6g}"
            for before, row in times[0][:2]
        )
        yield Verdict(
            sentence="one tensor is summed over the ranks twice with no change in between: it ends up as the sum times "
            "the number of ranks",
            remedy=REMEDY,
            locations=(site_location(record.site(second)), site_location(record.site(first))),
            ranks=ranks,
            because=((shown, site_location(record.site(first)), {"times": len(times), "ranks": len(ranks)}),),
        )


def _takes_in(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> bool:
    """Return whether every rank gives at least the sum of what all gave before, and one of them more."""
    sums = [sum(numbers) for numbers in zip(*before, strict=False)]
    held = all(now >= one * (1 - 1e-4) for numbers in after for now, one in zip(numbers, sums, strict=False))
    more = any(now > one * (1 + 1e-4) for numbers in after for now, one in zip(numbers, sums, strict=False))
    return bool(sums) and min(sums) > 0 and held and more


# Losses that a collective changes before their backward.

_IN_PLACE = frozenset({"all_reduce", "reduce"})


class ReducedLoss(msgspec.Struct, frozen=True, eq=False):
    """A loss that is reduced in place and then differentiated."""

    name: str
    collective: Event
    backward: Event


def reduced_losses(projection: Projection) -> Iterator[ReducedLoss]:
    """Collectives that write a variable of which the same call of a function takes the backward afterwards."""
    backwards = list(projection.of_kind("backward"))
    seen: set[ast.AST] = set()
    for event in reductions(projection):
        name = argument_name(event)
        for backward in backwards:
            later = backward.ordinal > event.ordinal and backward.scopes == event.scopes
            if not later or event.node in seen:
                continue
            if _starts_from(backward.node, name):
                starts = not _assigned_between(event, backward, name)
            else:
                starts = _is_loss(projection, event, name) and _becomes(event, backward, name)
            if starts:
                seen.add(event.node)
                yield ReducedLoss(name, event, backward)


def _is_loss(projection: Projection, event: Event, name: str) -> bool:
    """Return whether what is reduced was computed by the model, or by a loss of torch: a count of samples was not."""
    if event.positional and any(kind == "ddp" for kind, _ in tags_of(event.positional[0])):
        return True
    modules, line = projection.machine.script.modules, getattr(event.node, "lineno", 0)
    function, node = function_around(event.module, event.node), ast.parse(name, mode="eval").body
    return number_kind(modules, event.module, function, node, line) == "mean"


def reductions(projection: Projection) -> Iterator[Event]:
    """Collectives that write the sum, or the like, of a variable of all ranks into that variable."""
    for event in projection.of_kind("collective"):
        if event.name in _IN_PLACE and argument_name(event):
            yield event


def argument_name(event: Event) -> str:
    """Return the variable or attribute that a collective is given; empty when it is given anything else."""
    named = [entry.value for entry in getattr(event.node, "keywords", []) if entry.arg == "tensor"]
    arguments = getattr(event.node, "args", []) or named
    if arguments and isinstance(arguments[0], (ast.Name, ast.Attribute)):
        return arguments[0].id if isinstance(arguments[0], ast.Name) else ast.unparse(arguments[0])
    return ""


def _starts_from(node: ast.AST, name: str) -> bool:
    """``name.backward()``, ``scaler.scale(name).backward()``, ``accelerator.backward(name)``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    receiver = node.func.value
    scaled = isinstance(receiver, ast.Call) and last_name(receiver.func) == "scale"
    starts = [receiver, *node.args, *(receiver.args if scaled else ())]  # type: ignore[attr-defined]
    return any(isinstance(start, (ast.Name, ast.Attribute)) and ast.unparse(start) == name for start in starts)


def _becomes(event: Event, backward: Event, name: str) -> bool:
    """Return whether a backward starts from a sum or a quotient that the reduced loss was made part of."""
    first, last = getattr(event.node, "lineno", 0), getattr(backward.node, "lineno", 0)
    nodes = nodes_of(function_around(event.module, event.node))
    between = [node for node in nodes if isinstance(node, ast.Assign) and first < node.lineno < last]
    holding = {name}
    for node in sorted(between, key=lambda node: node.lineno):
        if event.module.in_other_arms(event.node, node):
            continue
        made = isinstance(node.value, ast.BinOp) and _computes_with(node.value, holding)
        for target in node.targets:
            (holding.add if made else holding.discard)(ast.unparse(target))
    return any(_starts_from(backward.node, one) for one in holding)


def _computes_with(node: ast.expr, names: set[str]) -> bool:
    """Return whether a variable is an operand, not merely an argument of a call, whose result may be cut off."""
    if isinstance(node, ast.BinOp):
        return _computes_with(node.left, names) or _computes_with(node.right, names)
    return isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in names


def _assigned_between(event: Event, backward: Event, name: str) -> bool:
    first, last = getattr(event.node, "lineno", 0), getattr(backward.node, "lineno", 0)
    if first >= last:
        return True
    nodes = nodes_of(function_around(event.module, event.node))
    return any(stores(node, name) and first <= getattr(node, "lineno", 0) <= last for node in nodes)


_TELLING = frozenset({ast.Assign, ast.AugAssign, ast.BinOp, ast.Call, ast.Return})
"""Classes of nodes that show a sum, make it a mean, or give it another name."""
# Methods that may make a mean of a sum: a product counts, for the factor may be one over the ranks.
_AVERAGES = frozenset({"div", "div_", "mul", "mul_", "mean", "true_divide", "divide", "divide_"})
_DIVIDING = (ast.Div, ast.FloorDiv, ast.Mult)
FunctionNode: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"


class _Part(msgspec.Struct, frozen=True, eq=False):
    """What a function does with a sum from some line on."""

    module: Module
    nodes: Sequence[ast.AST]
    names: frozenset[str]
    """The variables that hold it."""
    after_line: int

    @property
    def averages(self) -> bool:
        """It may become a mean here, or in what cannot be followed."""
        returned = (node.value for node in self.nodes if isinstance(node, ast.Return) and node.value is not None)
        given_back = any(mentions(value, self.names) and not self.is_sum(value) for value in returned)
        return given_back or any(_divides(node, self.names) for node in self.nodes)

    @property
    def returns_it(self) -> bool:
        """The sum itself is given back."""
        returned = (node.value for node in self.nodes if isinstance(node, ast.Return) and node.value is not None)
        return any(map(self.is_sum, returned))

    def is_sum(self, node: ast.expr) -> bool:
        """Return whether an expression is one of the variables, or its number."""
        return is_number_of(node, self.names)

    def shown(self) -> Iterator[ast.Call]:
        """Yield the calls that show it."""
        for node in self.nodes:
            if isinstance(node, ast.Call) and last_name(node.func) in SHOWS and node.lineno > self.after_line:
                inside = [*node.args, *(keyword.value for keyword in node.keywords)]
                if any(mentions(part, self.names) for part in inside):
                    yield node


def shown_sums(projection: Projection) -> Iterator[Finding]:
    """Sums over ranks of means of their batches, shown and nowhere divided; sums and counts are added up rightly."""
    modules = projection.machine.script.modules
    seen: set[ast.AST] = set()
    for event in reductions(projection):
        name = argument_name(event)
        if event.node in seen or not _is_sum(event) or not _may_be_shown(modules):
            continue
        seen.add(event.node)
        function, line = function_around(event.module, event.node), getattr(event.node, "lineno", 0)
        if number_kind(modules, event.module, function, ast.parse(name, mode="eval").body, line) != "mean":
            continue
        part = _part(event.module, function, name, line)
        if part.averages or _is_rate(event) or _is_share(projection, event, function, name):
            continue
        if not part.returns_it:
            yield from _shown_in(part, event, name)
        elif isinstance(function, ast.FunctionDef):
            yield from _shown_by_callers(modules, function, event)


def compared_sums(projection: Projection) -> Iterator[tuple[Event, ast.Compare]]:
    """Tensors that are summed over the ranks and then compared with each other, item by item: classes, say."""
    summed: dict[FunctionNode | ast.AST, dict[str, Event]] = {}
    for event in projection.of_kind("collective"):
        if event.name in {"all_reduce", "reduce"} and _is_sum(event) and "group" not in event.named:
            names = summed.setdefault(function_around(event.module, event.node), {})
            names.setdefault(argument_name(event), event)
    for function, names in summed.items():
        for node in nodes_of(function) if len(names) > 1 else ():
            if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
                continue
            both = {ast.unparse(side) for side in (node.left, *node.comparators)}
            first = names.get(ast.unparse(node.left))
            if first is None or len(both) != 2 or not both <= names.keys() or not _is_after(node, names, both):
                continue
            # Of tensors what comes out is counted; two totals may well be asked whether they are one.
            if isinstance(first.module.parents.get(node), (ast.Attribute, ast.Call)):
                yield first, node
                break


def _is_after(node: ast.Compare, names: dict[str, Event], both: set[str]) -> bool:
    return all(getattr(names[name].node, "lineno", 0) < node.lineno for name in both)


def _shown_in(part: _Part, event: Event, name: str) -> Iterator[Finding]:
    """Yield the first call that shows a sum."""
    calls = list(part.shown())
    if calls:
        shown = part.module.location(min(calls, key=lambda call: call.lineno))
        yield CHECK.finding(
            f"`{name}` is the sum over all ranks when line {shown.line} shows it, world size times the mean",
            remedy="Divide by dist.get_world_size() after the reduction, or reduce with op=dist.ReduceOp.AVG.",
            locations=(event.location, shown),
            because=(f"`{name}` is shown here, undivided", shown),
        )


def _shown_by_callers(modules: Sequence[Module], function: FunctionNode, event: Event) -> Iterator[Finding]:
    """Yield where the callers of a function show the sum that it gives back; none when one of them may divide it."""
    found: list[Finding] = []
    for module in modules:
        others = [node for node in module.index.of(ast.FunctionDef) if node.name == function.name]
        if any(node is not function for node in others):
            return
        for call in module.calls_by_name.get(function.name, ()):
            statement = module.parents.get(call)
            if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
                return
            target = statement.targets[0]
            if not isinstance(target, ast.Name):
                return
            part = _part(module, function_around(module, call), target.id, call.lineno)
            if part.averages or part.returns_it:
                return
            found.extend(_shown_in(part, event, target.id))
    yield from found[:1]


def _may_be_shown(modules: Sequence[Module]) -> bool:
    return any(not SHOWS.isdisjoint(module.calls_by_name) for module in modules)


def _part(module: Module, function: ast.AST, name: str, after_line: int) -> _Part:
    nodes = [node for node in nodes_of(function) if node.__class__ in _TELLING]
    return _Part(module, nodes, frozenset(followers(nodes, name)), after_line)


def _is_sum(event: Event) -> bool:
    operation = event.argument("op", 1 if event.name == "all_reduce" else 2)
    if operation is None:
        return event.complete
    return isinstance(operation, External) and operation.name.endswith(".SUM") and constant(operation) is ...


def _is_rate(event: Event) -> bool:
    """Return whether what is summed was divided by a time: the ranks' samples a second add up to the job's."""
    return any(kind == "clock" for value in event.positional[:1] for kind, _ in tags_of(value))


def _is_share(projection: Projection, event: Event, function: ast.AST, name: str) -> bool:
    """Return whether what is summed was divided by the number of ranks before: shares add up to the mean."""
    counts = size_names(projection.machine.store)
    return any(
        isinstance(inner, ast.BinOp) and isinstance(inner.op, _DIVIDING) and not counts.isdisjoint(_words(inner))
        for node in descend(function)
        if isinstance(node, ast.Assign)
        and any(ast.unparse(target) == name for target in node.targets)
        and node.lineno < getattr(event.node, "lineno", 0)
        for inner in descend(node.value)
    )


def _words(node: ast.AST) -> Iterator[str]:
    return (last_name(inner) for inner in descend(node) if isinstance(inner, (ast.Name, ast.Attribute)))


def _divides(node: ast.AST, names: frozenset[str]) -> bool:
    """Return whether a node makes a mean of one of some variables."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, _DIVIDING) and mentions(node, names)
    if isinstance(node, ast.AugAssign):
        return isinstance(node.op, _DIVIDING) and mentions(node.target, names)
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _AVERAGES
    return is_method and mentions(node, names)
