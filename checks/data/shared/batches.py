"""What to do where a batch sampler gives every rank the same batches: a loader takes no ``sampler`` beside it."""

from __future__ import annotations

OF_TORCH = frozenset({"SequentialSampler", "RandomSampler", "torch.utils.data.BatchSampler"})
"""What torch's own batch sampler draws from, and itself: it divides as soon as its sampler does."""


def batches_remedy(sampler: str) -> str:
    """Return the remedy for a batch sampler of this name, or for torch's own one that draws from such a sampler."""
    if sampler in OF_TORCH:
        return (
            "Give the batch sampler DistributedSampler(dataset) as its sampler, and call set_epoch(epoch) of that one "
            "before every epoch."
        )
    return (
        f"Let {sampler} give each rank its own batches, as many as the others: "
        "batches[rank : len(batches) // world_size * world_size : world_size], of an order that is the same on all "
        "ranks."
    )
