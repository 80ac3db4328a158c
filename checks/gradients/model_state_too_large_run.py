"""How much of a GPU the state of the model takes: weights, gradients, DDP's buckets, and what the optimizer keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ddpdoctor.check import NotStated
from ddpdoctor.diagnosis.performance.summary import threshold
from ddpdoctor.record.model import RunRecord, Wrap
from ddpdoctor.record.streams.measured import OptimizerSize

SMALLEST_GPU_BYTES = 1 << 30
"""What leaves room on a GPU of this memory does so on every one that torch runs on."""


class ModelState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of what is trained on one GPU, in bytes."""

    memory_bytes: int
    """Of the GPU; 0 where it is not known."""
    stated: bool = False
    """The project says so; no GPU was asked."""
    ranks: tuple[int, ...]
    """Those that use it."""
    parameter_bytes: int
    buffer_bytes: int
    gradient_bytes: int
    bucket_bytes: int
    """Gradients that DDP keeps a second time."""
    optimizer_bytes: int
    optimizers: tuple[str, ...]
    shared: bool = False
    """What the optimizers keep is a share of it: the ranks divide it among them."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        own = self.parameter_bytes + self.buffer_bytes + self.gradient_bytes
        return own + self.bucket_bytes + self.optimizer_bytes


def large_states(record: RunRecord) -> Iterator[ModelState]:
    """Yield the state on each GPU of which it takes most: the rest has to hold the activations of a batch.

    Raises NotStated for a rehearsal elsewhere than on the job's GPUs, where no one has said how large these are and it
    matters.
    """
    states = list(_on_gpus(record) if record.job.kind == "run" else _of_ranks(record))
    limit = threshold(record, "model-state-too-large")
    for state in states:
        if state.total_bytes > limit * (state.memory_bytes or SMALLEST_GPU_BYTES):
            if not state.memory_bytes:
                raise NotStated(
                    "the memory of the job's GPUs is not known: state `device-memory-gib` in [tool.ddpdoctor.job]"
                )
            yield state


def _on_gpus(record: RunRecord) -> Iterator[ModelState]:
    for gpu in record.gpus:
        if not record.optimizer_sizes or not gpu.memory_total_bytes:
            continue
        sizes = [size for size in record.optimizer_sizes if size.rank in gpu.ranks]
        wraps = [wrap for wrap in record.wraps if wrap.rank in gpu.ranks]
        if sizes:
            yield _state(gpu.memory_total_bytes, gpu.ranks, sizes, wraps)


def _of_ranks(record: RunRecord) -> Iterator[ModelState]:
    """Yield what each rank of the job holds, which has a GPU for itself; nothing for a job that uses none."""
    machine = record.job.machine
    if not machine.may_use_gpus:
        return
    for rank in record.rank_numbers():
        sizes = [size for size in record.optimizer_sizes if size.rank == rank]
        wraps = _trained(record, rank)
        if not sizes:
            continue
        memory_bytes = machine.device_memory_bytes or max(size.device_memory_bytes for size in sizes)
        state = _state(memory_bytes, (rank,), sizes, wraps)
        held = sum(tensor.size_bytes for wrap in wraps for tensor in wrap.parameters)
        yield msgspec.structs.replace(
            state,
            stated=machine.device_memory_bytes > 0,
            parameter_bytes=max(state.parameter_bytes, held),
            buffer_bytes=sum(tensor.size_bytes for wrap in wraps for tensor in wrap.buffers),
            optimizer_bytes=_share_of_job(record, sizes),
        )


def _state(
    memory_bytes: int, ranks: tuple[int, ...], sizes: Sequence[OptimizerSize], wraps: Sequence[Wrap]
) -> ModelState:
    return ModelState(
        memory_bytes=memory_bytes,
        ranks=ranks,
        parameter_bytes=sum(size.parameter_bytes for size in sizes),
        buffer_bytes=0,
        gradient_bytes=sum(size.gradient_bytes for size in sizes),
        bucket_bytes=sum(map(_bucket_bytes, wraps)),
        optimizer_bytes=sum(size.state_bytes for size in sizes),
        optimizers=tuple(dict.fromkeys(size.type for size in sizes if size.state_bytes)),
        shared=any(size.shares_state for size in sizes),
    )


def _trained(record: RunRecord, rank: int) -> list[Wrap]:
    """Return the wraps of a rank whose parameters some optimizer steps: a module that was wrapped again counts once."""
    stepped = {wrap for step in record.optimizer_steps if step.rank == rank for wrap in step.wraps}
    return [wrap for wrap in record.wraps if wrap.rank == rank and wrap.wrap in stepped]


def _share_of_job(record: RunRecord, sizes: Sequence[OptimizerSize]) -> int:
    """Return what the optimizers of a rank of the job keep: where the ranks divide it, less than those of a rehearsal
    do.

    Nothing where it is divided and no one says by how many.
    """
    kept = sum(size.state_bytes for size in sizes)
    if not any(size.shares_state for size in sizes):
        return kept
    ranks = record.job.ranks_of_job or record.job.machine.ranks_per_node
    return kept * min(record.job.world_size, ranks) // ranks if ranks else 0


def _bucket_bytes(wrap: Wrap) -> int:
    if wrap.options.get("gradient_as_bucket_view") is not False:
        return 0
    return sum(parameter.size_bytes for parameter in wrap.parameters if parameter.requires_grad)
