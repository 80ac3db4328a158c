"""NVIDIA's apex, which is built from its sources for one GPU's CUDA: torch's own classes stand for what scripts use.

Mixed precision does nothing here, and neither do the fused kernels; ranks, collectives and parameters are as with apex.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

WHAT = "without mixed precision and with torch's DistributedDataParallel"


def module_of(name: str) -> ModuleType:
    """Return the module of a dotted name; raises ModuleNotFoundError for those that nothing stands for."""
    import torch

    parts = {"amp": _amp, "parallel": _parallel, "optimizers": _optimizers, "normalization": _normalization}
    part = name.partition(".")[2]
    if part and part not in parts:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    module = ModuleType(name)
    if part:
        vars(module).update(parts[part](torch))
    else:
        vars(module).update({one: module_of(f"{name}.{one}") for one in parts})
    return module


def _amp(torch: Any) -> dict[str, Any]:
    def initialize(models: Any, optimizers: Any = None, *arguments: Any, **options: Any) -> Any:
        return models if optimizers is None else (models, optimizers)

    @contextlib.contextmanager
    def scale_loss(loss: Any, optimizers: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
        yield loss

    def master_params(optimizer: Any) -> Iterator[Any]:
        return (parameter for group in optimizer.param_groups for parameter in group["params"])

    def unchanged(function: Any) -> Any:
        return function

    return {
        "initialize": initialize,
        "scale_loss": scale_loss,
        "master_params": master_params,
        "disable_casts": contextlib.nullcontext,
        "state_dict": dict,
        "load_state_dict": lambda state: None,
        **dict.fromkeys(("half_function", "float_function", "promote_function"), unchanged),
        **dict.fromkeys(
            ("register_half_function", "register_float_function", "register_promote_function"),
            lambda module, name: None,
        ),
    }


def _parallel(torch: Any) -> dict[str, Any]:
    class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):  # type: ignore[misc]
        """Takes the options of apex, which has no devices, never broadcasts buffers in a forward, and lets parameters
        go unused only where it reduces all gradients at the end (``delay_allreduce``).
        """

        def __init__(self, module: Any, *arguments: Any, delay_allreduce: bool = False, **options: Any) -> None:
            super().__init__(module, broadcast_buffers=False, find_unused_parameters=delay_allreduce)

    def convert_syncbn_model(module: Any, process_group: Any = None, channel_last: bool = False) -> Any:
        return torch.nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)

    def adapt_rates(optimizer: Any, *arguments: Any, **options: Any) -> Any:
        return optimizer

    return {
        "DistributedDataParallel": DistributedDataParallel,
        "SyncBatchNorm": torch.nn.SyncBatchNorm,
        "convert_syncbn_model": convert_syncbn_model,
        "create_syncbn_process_group": lambda group_size: None,
        "LARC": adapt_rates,
    }


def _optimizers(torch: Any) -> dict[str, Any]:
    pairs = (("FusedAdam", "AdamW"), ("FusedLAMB", "AdamW"), ("FusedSGD", "SGD"), ("FusedAdagrad", "Adagrad"))
    return {fused: _with_known_options(getattr(torch.optim, plain), fused) for fused, plain in pairs}


def _with_known_options(base: Any, name: str) -> type:
    known = inspect.signature(base.__init__).parameters

    def start(self: Any, params: Iterable[Any], **options: Any) -> None:
        base.__init__(self, params, **{key: value for key, value in options.items() if key in known})

    return type(name, (base,), {"__init__": start})


def _normalization(torch: Any) -> dict[str, Any]:
    return {
        **dict.fromkeys(("FusedLayerNorm", "MixedFusedLayerNorm"), torch.nn.LayerNorm),
        **dict.fromkeys(("FusedRMSNorm", "MixedFusedRMSNorm"), torch.nn.RMSNorm),
    }
