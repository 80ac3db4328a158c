"""Gradients are stored twice.

What it finds
    A DDP wrap without `gradient_as_bucket_view=True`, of a model whose gradients take at least 100 MB.

Why it is bad
    DDP copies each gradient into a bucket before it is all-reduced, and back. The buckets take as much memory as the
    gradients, and the copies take time.

Example
    model = DistributedDataParallel(large_model, device_ids=[local_rank])

Remedy
    Pass gradient_as_bucket_view=True: gradients are then views into the buckets, and the
    peak of memory is lower by their size.

When it is wrong
    Where .grad is detached in place (detach_()) or must not be a view.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import ExternalObject, Value, constant
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script
from ddpdoctor.source.torch_model.buffers import parts_of_module

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP211",
    name="no-gradient-bucket-view",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ADVICE),
    needs=frozenset({"wraps"}),
    subjects=("model",),
    triggers=("DistributedDataParallel", "ccelerat", "Fabric", "auto_model"),
)
WORTH_REPORTING_BYTES = 100_000_000
"""Bytes of gradients from which the second copy is worth a line."""
BYTES_PER_PARAMETER = 4


def in_source(script: Script) -> Iterator[Finding]:
    """Report wraps of large models that store their gradients twice."""
    projection = whole_projection(script)
    for wrap in projection.in_course("wrap"):
        module = wrap.argument("module", 0)
        if module is None or not wrap.complete or "gradient_as_bucket_view" in wrap.named:
            continue
        size_bytes = known_parameters(projection.machine, module) * BYTES_PER_PARAMETER
        if size_bytes < WORTH_REPORTING_BYTES:
            continue
        place = wrap.location
        yield CHECK.finding(
            "source",
            f"gradients are stored twice: at least {size_bytes / 1e6:,.0f} MB more than with gradient_as_bucket_view",
            remedy="Pass gradient_as_bucket_view=True to DistributedDataParallel.",
            locations=place,
            evidence=(
                Fact(
                    text=f"the layers with sizes in the source hold {size_bytes:,} bytes of float32 gradients",
                    basis="source",
                    numbers={"bytes": size_bytes},
                    location=place,
                ),
            ),
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the wraps whose buckets hold a second copy of large gradients."""
    from ddpdoctor.checks.gradients.ddp_failures_run import gradient_copies

    for copies in gradient_copies(record):
        if copies.size_bytes >= WORTH_REPORTING_BYTES:
            yield CHECK.finding(
                record.job.kind,
                f"gradients are stored twice: {copies.size_bytes / 1e6:,.0f} MB more than with gradient_as_bucket_view",
                remedy="Pass gradient_as_bucket_view=True to DistributedDataParallel.",
                locations=copies.location,
                evidence=(
                    Fact(
                        text=f"DDP's buckets hold a copy of {copies.size_bytes:,} bytes of gradients",
                        basis=record.job.kind,
                        numbers={"bytes": copies.size_bytes},
                    ),
                ),
            )
        elif copies.location is not None:
            amount = f"{copies.size_bytes:,} bytes" if copies.size_bytes else "no gradient"
            yield Refuted(location=copies.location, reason=f"{amount} would be stored once instead of twice")


# How many parameters a module has, as far as the arguments of its layers are numbers in the source.

_CONVOLUTION = re.compile(r"torch\.nn\.Conv(Transpose)?(\d)d$")


def known_parameters(machine: Machine, module: Value) -> int:
    """Parameters in the layers of a module whose sizes are known: a lower bound of all."""
    total = 0
    for part in parts_of_module(machine, module):
        made = machine.object(part) if isinstance(part, ExternalObject) else None
        if made is not None:
            total += _of_layer(made)
    return total


def _of_layer(made: Event) -> int:
    if made.name == "torch.nn.Linear":
        inputs, outputs = _number(made, "in_features", 0), _number(made, "out_features", 1)
        return inputs * outputs + outputs
    if made.name == "torch.nn.Embedding":
        return _number(made, "num_embeddings", 0) * _number(made, "embedding_dim", 1)
    convolution = _CONVOLUTION.match(made.name)
    if convolution is not None:
        width = _number(made, "kernel_size", 2)
        return prod((_number(made, "in_channels", 0), _number(made, "out_channels", 1), width ** int(convolution[2])))
    return 0


def _number(made: Event, name: str, position: int) -> int:
    value = made.argument(name, position)
    number = constant(value) if value is not None else 0
    return number if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 10**9 else 0
