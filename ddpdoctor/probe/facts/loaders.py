"""What is known of a DataLoader when it is made."""

from __future__ import annotations

from typing import Any, Optional


def loader_facts(loader: Any, torch: Any) -> dict[str, Any]:
    """Return the fields of a ``loader`` event, except for its number, its place and its length."""
    sampler = sharding_sampler(loader)
    dataset = loader.dataset
    batches = getattr(loader, "batch_sampler", None)
    # A loader that is given batches makes a sampler of its own beside them, which nobody asks.
    own = batches if batches is not None and type(batches) is not torch.utils.data.BatchSampler else None
    iterable = isinstance(dataset, torch.utils.data.IterableDataset)
    try:
        samples = None if iterable else len(dataset)
    except TypeError:
        samples = None
    return {
        "dataset_type": type(dataset).__qualname__,
        "dataset_length": samples,
        "iterable": iterable,
        "sampler_type": type(sampler or own or loader.sampler).__qualname__,
        "own_batches": batches is not None and getattr(loader, "batch_size", None) is None,
        "sampler_shards": sampler is not None,
        "sampler_rank": _number(sampler, "rank", "process_index"),
        "sampler_replicas": _number(sampler, "num_replicas", "num_processes", "world_size"),
        "sampler_seed": _number(sampler, "seed"),
        "sampler_shuffles": _shuffles(sampler or loader.sampler),
        "batch_size": _batch_size(loader, torch),
        "workers": loader.num_workers,
        "persistent": bool(getattr(loader, "persistent_workers", False)),
        "drop_last": bool(getattr(loader, "drop_last", False)),
    }


def sharding_sampler(loader: Any) -> Any:
    """Return the sampler or batch sampler of a loader that divides by rank; None when there is none."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for candidate in (getattr(batch_sampler, "sampler", None), batch_sampler, getattr(loader, "sampler", None)):
        for replicas, rank in (("num_replicas", "rank"), ("num_processes", "process_index"), ("world_size", "rank")):
            if hasattr(candidate, replicas) and hasattr(candidate, rank):
                return candidate
    return None


def length_of(loader: Any, length: Any) -> Optional[int]:
    """Return a loader's length by ``length``, its class's own method; None when it has none."""
    asked = getattr(loader, "_IterableDataset_len_called", None)
    try:
        return int(length(loader))
    except (TypeError, NotImplementedError):
        return None
    finally:
        # torch warns of streams that yield more than the length that the script has read.
        if asked is None and hasattr(loader, "_IterableDataset_len_called"):
            loader._IterableDataset_len_called = None


def _batch_size(loader: Any, torch: Any) -> Optional[int]:
    """Return the samples of a full batch; None where an own batch sampler decides."""
    batches = loader.batch_sampler
    plain = type(batches) is torch.utils.data.BatchSampler
    return _number(batches if plain else loader, "batch_size")


def _shuffles(sampler: Any) -> bool:
    return bool(getattr(sampler, "shuffle", type(sampler).__name__ == "RandomSampler"))


def _number(sampler: Any, *names: str) -> Optional[int]:
    values = (getattr(sampler, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)
