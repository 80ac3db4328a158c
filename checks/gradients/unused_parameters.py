"""Parameters of a DDP model receive no gradient.

What it finds
    Parameters that require a gradient and got none in a synchronised backward although others of the same model did,
    where neither `find_unused_parameters=True` nor `static_graph=True` serves it; and those that got none on any rank
    in any step, which these options hide, with the gather that ends the graph, where one does. In the source:
    attributes of a wrapped module that have parameters and are not used by any code that forward reaches, or are not
    frozen and run under no_grad only, or of whose results only argmax or detach are used; and those that forward
    leaves out where a draw is below a known number, or by the number of the rank.

Why it is bad
    DDP waits for a gradient of every parameter before it finishes its reduction. The next forward raises "Expected to
    have finished reduction in the prior iteration"; where ranks disagree about which parameters are used, the others
    hang in an all-reduce.

Example
    def forward(self, x):
        return self.head(self.body(x))      # self.auxiliary_head is never called

Remedy
    Remove or freeze (requires_grad_(False), before the wrap) what is never used; pass find_unused_parameters=True
    where the use depends on the input.

When it is wrong
    Where the gradient is produced by a hook of the user outside autograd.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    https://docs.pytorch.org/docs/stable/notes/ddp.html
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from ddpdoctor.check import Check, RunRecord, Script, Verdict
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import Instance, constant
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.parameters import (
    demands_all,
    frozen_before,
    is_own,
    modules_of,
    parameter_attributes,
    unused_parts,
)
from ddpdoctor.source.script.module import Module, descend

CHECK = Check(
    code="DDP201",
    name="unused-parameters",
    stands_for="unused-parameters",
    severity={"source": Severity.WARNING, "rehearsal": Severity.ERROR, "run": Severity.ERROR, "log": Severity.ERROR},
    needs=frozenset({"wraps", "missing_gradients"}),
    needs_live=frozenset({"ranks", "wraps"}),
    subjects=("model",),
    triggers=("DistributedDataParallel", "ccelerat", "Fabric", "auto_model", "ightning"),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report attributes with parameters that forward never comes to."""
    projection = whole_projection(script)
    yield from CHECK.suspected(chain(unused_parts(projection), _parts_left_out(projection)))
    if takes_outputs_apart(projection):
        from ddpdoctor.checks.gradients.output_left_out_source import outputs_left_out

        yield from CHECK.suspected(outputs_left_out(projection))


def takes_outputs_apart(projection: Projection) -> bool:
    """Return whether the script takes the outputs of a DDP model apart: ``boxes, masks = model(x)``."""
    around = (one.module.parents.get(one.node) for one in projection.in_course("ddp-forward"))
    return any(isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Tuple) for one in around)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the parameters without gradient of each wrap."""
    from ddpdoctor.diagnosis.divergence.unused_parameters import never_used, unused_parameters

    yield from CHECK.judged(record.job.kind, (*unused_parameters(record), *never_used(record)))


# Parts that a forward leaves out by chance or by the rank.

_CHANCES = frozenset({"random.random", "numpy.random.rand", "numpy.random.random", "torch.rand"})
_SEARCH = "Pass find_unused_parameters=True, or let each forward run it and multiply what it gives by 0."
_LEAVES = (ast.Continue, ast.Return)


def _parts_left_out(projection: Projection) -> Iterator[Verdict]:
    """Yield parts with parameters that a forward comes to in one arm alone of a test of a draw, or of the rank."""
    machine, seen = projection.machine, set[ast.AST]()
    for wrap in (one for one in projection.in_course("wrap") if demands_all(one)):
        frozen = frozen_before(projection, wrap)
        for part in (one for one in modules_of(machine, wrap) if one.number not in frozen):
            module = machine.script.module(part.cls.module)
            forward = next((one for one in part.cls.node.body if getattr(one, "name", "") == "forward"), None)
            numbers = {
                name: getattr(machine.store.get(part.number, name), "number", 0)
                for name in parameter_attributes(machine, part)
            }
            for test in descend(forward) if forward is not None and module is not None else ():
                if module is None or forward is None or not isinstance(test, (ast.If, ast.IfExp)) or test in seen:
                    continue
                why = _chance(machine, module, part, test.test)
                left_out = _left_out(module, forward, test) if why else ()
                name = next((one for one in left_out if numbers.get(one, -1) not in {-1, *frozen}), "")
                if name:
                    seen.add(test)
                    yield Verdict(
                        sentence=f"forward of {part.cls.node.name} leaves out self.{name} {why}, and DDP waits for the "
                        "gradients of all parameters in each step",
                        remedy=_SEARCH,
                        locations=module.location(test.test),
                        because=("DDP has neither find_unused_parameters=True nor static_graph=True", wrap.location),
                    )


def _chance(machine: Machine, module: Module, part: Instance, test: ast.expr) -> str:
    """Return by what a test holds in some forwards or on some ranks alone: a draw below a known number, or the rank."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        if any(isinstance(one, ast.UnaryOp) for one in test.values):
            return ""  # Not in the training, say.
        return next((why for one in test.values if (why := _chance(machine, module, part, one))), "")
    if not isinstance(test, ast.Compare) or len(test.comparators) != 1:
        return ""
    sides = test.left, test.comparators[0]
    called = {module.resolve(one.func) for side in sides for one in descend(side) if isinstance(one, ast.Call)}
    if "torch.distributed.get_rank" in called:
        return "on some ranks"
    return "by chance" if called & _CHANCES and any(0 < _number(machine, part, one) < 1 for one in sides) else ""


def _number(machine: Machine, part: Instance, node: ast.expr) -> float:
    value = machine.store.get(part.number, node.attr) if isinstance(node, ast.Attribute) and is_own(node) else None
    known = node.value if isinstance(node, ast.Constant) else None if value is None else constant(value)
    return known if isinstance(known, float) else 0


def _left_out(module: Module, forward: ast.AST, test: ast.If | ast.IfExp) -> list[str]:
    """Return the attributes that a forward comes to in one arm of a test and nowhere else."""
    arms: list[Sequence[ast.AST]]
    arms = [[test.body], [test.orelse]] if isinstance(test, ast.IfExp) else [test.body, test.orelse]
    if isinstance(test, ast.If) and not test.orelse and isinstance(test.body[-1], _LEAVES):
        around = getattr(module.parents.get(test), "body", [])
        arms[1] = around[around.index(test) + 1 :] if test in around else []
    loops = [one for one in descend(forward) if isinstance(one, ast.For)]
    named = [
        (loop.target, one.attr)
        for loop in loops
        for one in descend(loop.iter)
        if isinstance(one, ast.Attribute) and is_own(one)
    ]
    items = {one.id: name for target, name in named for one in descend(target) if isinstance(one, ast.Name)}
    heads = {one for loop in loops for one in descend(loop.iter)}

    def used(nodes: Iterable[ast.AST]) -> Counter[str]:
        own = [one.attr for one in nodes if isinstance(one, ast.Attribute) and is_own(one) and one not in heads]
        loaded = [one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)]
        return Counter([*own, *(items[one] for one in loaded if one in items)])

    whole = used(descend(forward))
    inside = [used([one for node in arm for one in descend(node)]) for arm in arms]
    return [name for arm in inside for name, count in arm.items() if count == whole[name]]
