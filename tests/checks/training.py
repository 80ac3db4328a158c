"""Records of training jobs with loaders, passes, wraps and forwards, built by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ddpdoctor.record.model import Forward, TensorInfo, Wrap
from ddpdoctor.record.streams.training import Loader, Pass, SampleProbe
from tests.diagnosis.jobs import JobBuilder

LOADER_LINE = 20
WRAP_LINE = 30


def probes(value: Callable[[int], str] = "sample {}".format) -> tuple[SampleProbe, ...]:
    """Three samples fetched by index: an image and a constant."""
    return tuple(SampleProbe(index=index, leaves=(value(index), "constant")) for index in (0, 1, 7))


def training(job: JobBuilder, **loader: Any) -> dict[str, Any]:
    """Streams of a job whose ranks all make one loader that feeds a DDP module for four steps."""
    site = job.site(LOADER_LINE)
    return {
        "wraps": tuple(
            Wrap(
                rank=rank,
                wrap=0,
                site=job.site(WRAP_LINE),
                module_class="Net",
                options={"find_unused_parameters": False, "static_graph": False, "broadcast_buffers": True},
                parameters=(
                    *(
                        TensorInfo(name=f"layers.{layer}.{part}", shape=(10, 10), size_bytes=400)
                        for layer in range(6)
                        for part in ("weight", "bias")
                    ),
                    TensorInfo(name="head.weight", shape=(5, 10), size_bytes=200),
                ),
            )
            for rank in job.ranks
        ),
        "loaders": tuple(
            Loader(
                rank=rank,
                loader=0,
                site=site,
                **{"dataset_type": "Images", "dataset_length": 100, "samples": probes(), **loader},
            )
            for rank in job.ranks
        ),
        "passes": tuple(
            training_pass(rank, indices=range(100), index_count=100, index_digest=f"order {rank}") for rank in job.ranks
        ),
        "forwards": tuple(forward(rank, step) for step in range(4) for rank in job.ranks),
    }


def training_pass(rank: int, ordinal: int = 0, *, indices: Sequence[int] = (), **fields: Any) -> Pass:
    """A training pass that was cut after four batches."""
    values = {"yielded": 4, "end": "cut", "backwards": 4, "indices": tuple(indices), **fields}
    return Pass(rank=rank, loader=0, ordinal=ordinal, **values)


def forward(rank: int, step: int, digest: str = "") -> Forward:
    """A training forward on a batch of the loader; inputs differ between ranks unless a digest is given."""
    return Forward(
        rank=rank,
        wrap=0,
        step=step + 1,
        gradients=True,
        training=True,
        synchronised=True,
        pass_loader=0,
        input_digest=digest or f"rank {rank} step {step}",
    )
