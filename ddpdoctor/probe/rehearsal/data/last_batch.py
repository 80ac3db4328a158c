"""How many samples the last batch of a pass holds, by the attributes of its loader."""

from __future__ import annotations

from typing import Any, Optional


def short_batch_samples(iterator: Any, ranks_of_job: int) -> Optional[int]:
    """Return the samples of the short batch that ends a whole pass; 0 when all are full, None when not known.

    ``ranks_of_job`` is how many ranks divide the data when the job is not rehearsed; 0 when that is not known.
    """
    batches = getattr(iterator, "_index_sampler", None)
    if not getattr(iterator, "_auto_collation", False):
        # The data set hands out what it likes, batches or single samples.
        return 0
    if getattr(iterator, "_drop_last", True) or getattr(batches, "drop_last", False):
        return 0
    if getattr(batches, "even_batches", False):
        # Accelerate fills the last batch up with the first samples.
        return 0
    if getattr(iterator, "_dataset_kind", 1) != 0:
        return None
    size, samples = getattr(batches, "batch_size", None), _samples(getattr(batches, "sampler", None), ranks_of_job)
    return samples % size if isinstance(size, int) and size > 0 and samples is not None else None


def _samples(sampler: Any, ranks_of_job: int) -> Optional[int]:
    """Return the samples that a pass of one rank draws; None when the sampler has no length."""
    from torch.utils.data import DistributedSampler

    try:
        samples = len(sampler)
        if ranks_of_job and type(sampler).__len__ is DistributedSampler.__len__:
            whole = len(sampler.dataset)
            samples = whole // ranks_of_job if sampler.drop_last else -(-whole // ranks_of_job)
    except (TypeError, AttributeError, NotImplementedError):
        return None
    return int(samples)
