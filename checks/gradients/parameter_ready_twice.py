"""A gradient arrives twice in one reduction.

What it finds
    DDP's error "Expected to mark a variable ready only once", with the name of the parameter where torch gives its
    index, and whether reentrant checkpointing was at work. In a run also the same without the error: gradients that
    came twice in one backward and differ between the ranks.

Why it is bad
    DDP reduces each parameter once a backward. A parameter that is used by several reentrant checkpoints, or by two
    forwards with separate backwards, arrives a second time. The job ends with an error; or the second gradient is not
    averaged, and every rank trains its own model.

Example
    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)       # self.layer is used twice
        return x

Remedy
    Pass use_reentrant=False to torch.utils.checkpoint; or static_graph=True to DistributedDataParallel if every step
    uses the same parameters in the same order. Without checkpoints: one backward for the sum of the losses.

When it is wrong
    No case is known: it is torch's own error.

References
    https://docs.pytorch.org/docs/stable/checkpoint.html
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, RunRecord
from ddpdoctor.checks.gradients.steps_run import ready_twice
from ddpdoctor.diagnosis.logs.remedies import CHECKPOINTS
from ddpdoctor.diagnosis.training.replicas import unaveraged
from ddpdoctor.finding import Finding, Refuted, Severity

CHECK = Check(
    code="DDP210",
    name="parameter-ready-twice",
    stands_for="ready-twice",
    severity=dict.fromkeys(("rehearsal", "run", "log"), Severity.ERROR),
    needs=frozenset({"ranks"}),
)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the exception with the parameter and the remedy that fits, and what went wrong without one."""
    for silent in unaveraged(record):
        if silent.why == "twice":
            yield CHECK.finding(
                f"in this backward gradients of {silent.model} arrived twice, and DDP averaged what arrived first: "
                f"{', '.join(silent.names)}",
                basis=record.job.kind,
                remedy=CHECKPOINTS,
                locations=silent.location,
                ranks=silent.ranks,
                because=silent.because,
            )
    yield from CHECK.judged(record.job.kind, ready_twice(record))
