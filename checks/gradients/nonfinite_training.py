"""Parameters are NaN or inf, and on which rank, in which step and where that began.

What it finds
    Parameters of a DDP model that are no longer finite, in a live run and in a rehearsal, or 64 backwards in a row of
    which none was finite. Each rank looks at its loss before each backward, at a gradient before its reduction (in a
    rehearsal at every one) and at a parameter after each step of the optimizer. The finding names the first rank and
    step, and what made the value: the batch (with the samples, where the pass keeps them), an operation of the forward
    (with the module, found in the forward after it), the backward (with the first parameter), the step of the
    optimizer, or a change of the parameters elsewhere; and the ranks that only received it through the reduction. Steps
    that are skipped for it, by a gradient scaler or by the script, are in order as long as the parameters stay finite.

Why it is bad
    One rank's NaN is averaged into the gradients of all ranks, and the step writes it into every parameter. From then
    on every rank shows NaN, and nothing tells whose it was.

Example
    spread = features.std(dim=0)                # of a batch with one sample: NaN
    loss = criterion(model(features / spread), target)

Remedy
    Mend what made it: leave the sample out, add an epsilon under the root or in the denominator, clamp the argument of
    the logarithm, lower the learning rate. To skip such a step, let all ranks decide together.

When it is wrong
    If the parameters are meant to hold such values. A parameter that holds one at the first forward is left out.

References
    https://docs.pytorch.org/docs/stable/amp.html
    https://docs.pytorch.org/docs/stable/autograd.html#anomaly-detection
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, RunRecord, TooLittleEvidence
from ddpdoctor.diagnosis.training.nonfinite import Origin, origin
from ddpdoctor.diagnosis.wording import count, rank_list, site_location
from ddpdoctor.finding import Finding, Severity

CHECK = Check(
    code="DDP231",
    name="nonfinite-training",
    severity=dict.fromkeys(("rehearsal", "run"), Severity.ERROR),
    needs=frozenset({"nonfinites"}),
)
_OPERATION = "Keep the argument of that operation where its result is finite: clamp it, or add an epsilon."
_SAID = {
    "data": (
        "the batch of {who} in step {row.step} holds NaN or inf{samples}, and training is not finite since",
        "Leave such samples out of the data set, or replace the values in them.",
    ),
    "outside": (
        "{since}: on {who} a value that the model only takes in was {row.value}",
        "Look for what computes that value: an epsilon in a denominator or under a root keeps it finite.",
    ),
    "forward": ("{since}: on {who} `{row.operation}` {where} made the first {row.value}", _OPERATION),
    "loss": ("{since}: on {who} `{row.operation}` in the loss made the first {row.value}", _OPERATION),
    "backward": (
        "{since}: on {who} the loss was finite, and the gradient{of} was not",
        "Look for a root, a norm or a division at zero: its value is finite, its derivative is not.",
    ),
    "optimizer": (
        "the optimizer made parameters NaN or inf of finite gradients on {who} in step {row.step}",
        "Look at the learning rate and the options of the optimizer in this step.",
    ),
    "changed": (
        "parameters of {who} were made NaN or inf between the optimizer's step and the forward in step {row.step}",
        "Look for what sets parameters outside of the optimizer: a copy, an average, a loaded file.",
    ),
    "unknown": (
        "{since}",
        "Run the step again from the checkpoint before it, under torch.autograd.set_detect_anomaly(True).",
    ),
}
"""Title and remedy by the cause."""


def in_run(record: RunRecord) -> Iterator[Finding]:
    """Report where the training was first not finite."""
    found = origin(record)
    if found is None:
        return
    if record.job.kind == "rehearsal" and (unlike := _unlike_the_job(record)):
        raise TooLittleEvidence(f"parameters became NaN or inf in step {found.first.step}, but {unlike}")
    place = site_location(record.site(found.first.site))
    yield CHECK.finding(
        _title(record, found),
        basis=record.job.kind,
        remedy=_SAID[found.cause][1],
        ranks=found.ranks,
        locations=place,
        because=tuple((text, None) for text in _facts(record, found)),
        doubt="" if found.ranks else "on which rank it began is not known: what was sampled was finite on every one",
    )


def _unlike_the_job(record: RunRecord) -> str:
    """Say what the rehearsal does otherwise than the job that could bring it about; empty where nothing does."""
    if record.job.pretended:
        return "the data or weights were pretended"
    if record.job.batch_size:
        return f"the rehearsal cut batches to {record.job.batch_size} samples, of which some statistics are not finite"
    return "the CPU stood in for GPUs" if record.job.device == "stand-in" else ""


def _title(record: RunRecord, found: Origin) -> str:
    row = found.first
    if len(found.ranks) == len(record.ranks):
        who = "every rank"
    else:
        who = rank_list(found.ranks) if found.ranks else "a rank that is not known"
    where = f"in `{row.module}` ({row.module_class})" if row.module else f"near {row.near}" if row.near else ""
    return _SAID[found.cause][0].format(
        row=row,
        who=who,
        since=f"training is not finite since step {row.step}",
        samples=f" (sample {', '.join(map(str, row.samples))})" if row.samples else "",
        where=where or "in the forward",
        of=f" of {row.parameters[0]}" if row.parameters else "",
    )


def _facts(record: RunRecord, found: Origin) -> Iterator[str]:
    row = found.first
    if row.kind == "loss":
        batch = {True: "its batch was finite, ", False: "", None: ""}[row.batch_finite]
        yield f"rank {row.rank}: {batch}its parameters were finite, the loss was not (backward {row.backward})"
    elif row.kind == "gradient":
        yield (
            f"rank {row.rank}: loss and parameters were finite, and gradients were not before their reduction "
            f"(backward {row.backward}), from the end of the model on: {', '.join(row.parameters)}"
        )
    elif row.gradients_finite:
        rates = f", with the learning rate {', '.join(dict.fromkeys(row.learning_rates))}" if row.learning_rates else ""
        yield f"rank {row.rank}: gradients were finite after their reduction, parameters were not after the step{rates}"
    elif row.after_step and row.gradients_finite is False:
        yield f"rank {row.rank}: gradients were not finite when the optimizer stepped"
    if found.cause == "forward" and row.module:
        yield f"the graph of that loss holds no such value before `{row.operation}`"
    if row.batch >= 0:
        kept = f", samples {', '.join(map(str, row.samples))}" if row.samples else ""
        rows = f", rows {', '.join(map(str, row.rows))}" if row.rows and not row.samples else ""
        yield (
            f"to see it again: load the last checkpoint before step {row.step}, and take batch {row.batch} of pass "
            f"{row.pass_ordinal} (both from 0) on rank {row.rank}{kept}{rows}"
        )
    if found.received:
        yield f"{rank_list(found.received)} received it through the reduction, or in a later step"
    if row.streak:
        yield f"no backward of {count(row.streak, 'backward', 'backwards')} in a row was finite; the parameters are"
    elif found.broken:
        are = "is" if found.broken == 1 else "are"
        yield f"{count(found.broken, 'parameter', 'parameters')} of the model {are} no longer finite"
