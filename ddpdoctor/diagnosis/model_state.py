"""How much of a GPU the state of the model takes: weights, gradients, DDP's buckets, and what the optimizer keeps."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.diagnosis.thresholds import threshold
from ddpdoctor.record.measured import Gpu
from ddpdoctor.record.model import RunRecord


class ModelState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of what is trained on one GPU, in bytes."""

    gpu: Gpu
    parameter_bytes: int
    gradient_bytes: int
    bucket_bytes: int
    """Gradients that DDP keeps a second time."""
    optimizer_bytes: int
    optimizers: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.parameter_bytes + self.gradient_bytes + self.bucket_bytes + self.optimizer_bytes


def large_states(record: RunRecord) -> Iterator[ModelState]:
    """Yield the state on each GPU of which it takes most: the rest has to hold the activations of a batch."""
    limit = threshold(record, "model-state-too-large")
    for gpu in record.gpus:
        sizes = [size for size in record.optimizer_sizes if size.rank in gpu.ranks]
        state = ModelState(
            gpu=gpu,
            parameter_bytes=sum(size.parameter_bytes for size in sizes),
            gradient_bytes=sum(size.gradient_bytes for size in sizes),
            bucket_bytes=sum(_bucket_bytes(record, rank) for rank in gpu.ranks) if sizes else 0,
            optimizer_bytes=sum(size.state_bytes for size in sizes),
            optimizers=tuple(dict.fromkeys(size.type for size in sizes)),
        )
        if gpu.memory_total_bytes and state.total_bytes > limit * gpu.memory_total_bytes:
            yield state


def _bucket_bytes(record: RunRecord, rank: int) -> int:
    return sum(
        parameter.size_bytes
        for wrap in record.wraps
        if wrap.rank == rank and wrap.options.get("gradient_as_bucket_view") is False
        for parameter in wrap.parameters
        if parameter.requires_grad
    )
