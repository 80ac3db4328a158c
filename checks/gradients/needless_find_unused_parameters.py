"""find_unused_parameters is on, and every parameter is used.

What it finds
    `find_unused_parameters=True` for a module that could be read completely: its forward has no branches and reaches
    everything that has parameters. In a run: every parameter got a gradient on every rank in all the steps seen; advice
    where a framework set the option.

Why it is bad
    After every forward DDP walks the whole autograd graph in search of unused parameters, although there are none, and
    its buckets wait for a bitmap that is all-reduced as well. It costs time in every step, and it hides the error that
    a really unused parameter would raise.

Example
    model = DistributedDataParallel(model, device_ids=[local_rank], find_unused_parameters=True)

Remedy
    Omit find_unused_parameters, and run once to confirm that no error about unused parameters is raised.

When it is wrong
    Where the loss uses only a part of what forward returns, or hooks change which parameters are used.

References
    https://docs.pytorch.org/docs/stable/notes/ddp.html
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.check import Check, Script
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.fix import Fix, fix_of, node_at, without_keyword
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.queries.parameters import needless_searches

CHECK = Check(
    code="DDP202",
    name="needless-find-unused-parameters",
    severity={"source": Severity.ADVICE, "rehearsal": Severity.WARNING, "run": Severity.WARNING},
    needs=frozenset({"wraps", "wrap_changes", "backwards", "missing_gradients"}),
    needs_live=frozenset({"wraps", "unused_searches"}),
    subjects=("model",),
    triggers=("find_unused_parameters",),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report wraps that search for unused parameters in modules that use all of them."""
    needless = list(needless_searches(whole_projection(script)))
    # Every part runs, and some of what they give enters the loss for some batches only: the search is needed.
    needed = _left_out(script) if needless else set()
    for wrap, parts in (one for one in needless if one[0].ordinal not in needed):
        used = f"all {parts} parts" if parts > 1 else "the one part"
        yield CHECK.finding(
            f"DDP searches for unused parameters in every step, and forward uses {used} with parameters",
            remedy="Omit find_unused_parameters and run once: an unused parameter would raise an error.",
            locations=wrap.location,
        )


def _left_out(script: Script) -> set[int]:
    from ddpdoctor.checks.gradients.output_left_out_source import wraps_with_outputs_left_out

    return wraps_with_outputs_left_out(whole_projection(script))


in_run = CHECK.judged_by("checks.gradients.steps_run", "searches")


_OPTION = "find_unused_parameters"


def fixes(script: Script, finding: Finding) -> Iterator[Fix]:
    """Leave ``find_unused_parameters`` out of the wrap; never safe, because a path that was not seen may need it."""
    found = node_at(script, finding, ast.Call)
    if found is not None:
        yield from fix_of(finding, f"omit {_OPTION}", without_keyword(*found, _OPTION))
