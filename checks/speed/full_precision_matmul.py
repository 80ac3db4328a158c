"""A GPU with tensor cores multiplies in full precision.

What it finds
    Training of a DDP model on GPUs in a script that mentions no autocast, no bfloat16 or float16 and no TF32. In a live
    run: a model of which most weights of linear and convolution layers are multiplied in full float32, on a GPU that
    has TF32, in one of its first forwards.

Why it is bad
    By default torch multiplies float32 matrices in full float32, without the tensor cores that every NVIDIA data-centre
    GPU since Volta has (TF32 and bfloat16 since Ampere). They do the same work several times faster, and gradients of
    half the size also shorten the all-reduce.

Example
    loss = criterion(model(inputs), targets)

Remedy
    `with torch.autocast("cuda", dtype=torch.bfloat16):` around forward and loss; or, with no change to the code
    besides, torch.set_float32_matmul_precision("high").

When it is wrong
    Where the numbers need full precision, or the GPU has no tensor cores.

References
    https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
    https://docs.pytorch.org/docs/stable/amp.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.checks.speed.input_speed_source import full_precision_wraps
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP407",
    name="full-precision-matmul",
    severity=dict.fromkeys(("source", "run"), Severity.ADVICE),
    needs=frozenset({"wraps", "matmul_precisions"}),
    subjects=("wrap", "training"),
    triggers=("DataParallel", "ccelerat", "Fabric", "auto_model"),
)
_REMEDY = 'Use torch.autocast with bfloat16, or torch.set_float32_matmul_precision("high").'


def in_source(script: Script) -> Iterator[Finding]:
    """Report the model of a job on GPUs that never asks for less than full float32."""
    for wrap in full_precision_wraps(whole_projection(script)):
        yield CHECK.finding(
            "source",
            "this model trains in full float32: the GPU's tensor cores are not used",
            remedy=_REMEDY,
            locations=wrap.location,
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the models that were seen to be multiplied in full float32."""
    from ddpdoctor.checks.speed.full_precision_matmul_run import full_precision_models

    for model in full_precision_models(record):
        yield CHECK.finding(
            "run",
            f"{model.module} is multiplied in full float32: the GPU's tensor cores are not used",
            remedy=_REMEDY,
            locations=model.location,
            ranks=model.ranks,
            evidence=(
                Fact(
                    text=f"of {model.weights:,} weights of linear and convolution layers {model.full_weights:,} are "
                    "multiplied in float32, under no autocast and not as TF32",
                    basis="run",
                    numbers={"weights": model.weights, "full_weights": model.full_weights},
                    location=model.location,
                ),
            ),
        )
