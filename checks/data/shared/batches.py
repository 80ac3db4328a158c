"""What to do where a batch sampler gives every rank the same batches."""

from __future__ import annotations


def batches_remedy(sampler: str) -> str:
    """Return the remedy for a batch sampler of this name: a loader takes no ``sampler`` beside it."""
    return (
        f"Let {sampler} give each rank its own batches, as many as the others: "
        "batches[rank : len(batches) // world_size * world_size : world_size], of an order that is the same on all "
        "ranks."
    )
