"""What is known of a module when DistributedDataParallel wraps it."""

from __future__ import annotations

from typing import Any

OPTIONS = (
    "find_unused_parameters",
    "static_graph",
    "broadcast_buffers",
    "forward_sync_buffers",
    "gradient_as_bucket_view",
    "bucket_cap_mb",
)


def wrap_facts(ddp: Any, given: dict[str, Any], torch: Any) -> dict[str, Any]:
    """Return the fields of a ``wrap`` event; ``given`` are the arguments of the constructor by name."""
    module = ddp.module
    options: dict[str, Any] = {}
    for option in OPTIONS:
        if option in given or hasattr(ddp, option):
            value = getattr(ddp, option, given.get(option))
            options[option] = value if isinstance(value, (bool, int, float, str)) or value is None else str(value)
    unsynchronised, synchronised = batch_norms(module, torch)
    return {
        "module_class": type(module).__qualname__,
        "options": options,
        "parameters": [_describe(name, tensor) for name, tensor in module.named_parameters()],
        "buffers": [_describe(name, tensor) for name, tensor in module.named_buffers()],
        "ranks": torch.distributed.get_process_group_ranks(ddp.process_group),
        "ignored": sorted(set(getattr(ddp, "parameters_to_ignore", ()))),
        "batch_norms": len(unsynchronised),
        "synchronised_batch_norms": synchronised,
    }


def batch_norms(module: Any, torch: Any) -> tuple[list[Any], int]:
    """Return the BatchNorm layers of a module that see only their own rank's batch, and how many see every rank's."""
    layers = [part for part in module.modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)]
    own = [layer for layer in layers if not isinstance(layer, torch.nn.SyncBatchNorm)]
    return own, len(layers) - len(own)


def _describe(name: str, tensor: Any) -> dict[str, Any]:
    return {
        "name": name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).replace("torch.", ""),
        "size_bytes": tensor.numel() * tensor.element_size(),
        "requires_grad": bool(tensor.requires_grad),
    }
