"""Parameters of a DDP model receive no gradient.

What it finds
    Parameters that require a gradient and got none in a synchronised backward although others of the same model did,
    where neither `find_unused_parameters=True` nor `static_graph=True` serves it; and those that got none on any rank
    in any step, which these options hide, with the gather that ends the graph, where one does. In the source:
    attributes of a wrapped module that have parameters and are not used by any code that forward reaches, or are not
    frozen and run under no_grad only, or of whose results only argmax or detach are used.

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

from collections.abc import Iterator

from ddpdoctor.check import Check, RunRecord, Script
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.queries.parameters import unused_parts

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
    yield from CHECK.suspected(unused_parts(whole_projection(script)))


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the parameters without gradient of each wrap."""
    from ddpdoctor.diagnosis.divergence.unused_parameters import never_used, unused_parameters

    yield from CHECK.judged(record.job.kind, (*unused_parameters(record), *never_used(record)))
