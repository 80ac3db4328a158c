"""Stand-ins for packages that a script imports and this machine lacks: apex, trackers, and plain imports."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple, Optional

from ...user_code import leave_no_frame

# Experiment trackers that are not installed: modules that take everything and do nothing.

TRACKERS = frozenset(
    {
        "wandb",
        "mlflow",
        "neptune",
        "comet_ml",
        "clearml",
        "aim",
        "swanlab",
        "trackio",
        "visdom",
        "tensorboard",
        "tensorboardX",
        "tensorboard_logger",
    }
)
"""Top-level modules; what torch.utils.tensorboard lacks is one of them, too."""


class Silent:
    """An object that takes every call, attribute, item and context, and does nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **options: Any) -> Any:  # noqa: D102 - it has nothing to say
        # As a decorator it gives back the function that it gets.
        alone = len(arguments) == 1 and not options and callable(arguments[0]) and not isinstance(arguments[0], type)
        return arguments[0] if alone and not isinstance(arguments[0], Silent) else Silent()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Silent()

    def __getitem__(self, key: object) -> Any:
        return Silent()

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return "silent"

    def __fspath__(self) -> str:
        return "silent"


class SilentModule(ModuleType):
    """A tracker without effect; names in capitals are classes, which can be inherited from."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (Silent,), {}) if name[:1].isupper() else Silent()
        setattr(self, name, made)
        return made


# NVIDIA's apex, which is built from its sources for one GPU's CUDA: torch's own classes stand for what scripts use.

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


class StandIn(NamedTuple):
    """What stands for a package."""

    module: Callable[[str], ModuleType]
    """Makes the module of a dotted name; raises ModuleNotFoundError for an unknown one."""
    what: str
    """What it is, as the user reads it."""


def serve_imports(
    stand_ins: Mapping[str, StandIn], is_users: Callable[[str], bool], note: Callable[[str], None]
) -> None:
    """Serve the import statements of the user's files; libraries, which test what is installed, see nothing of it."""
    load = builtins.__import__
    served: dict[str, ModuleType] = {}

    def served_as(name: str, missing: str) -> ModuleType:
        if name not in served:
            served[name] = stand_ins[missing].module(name)
        return served[name]

    def import_or_pretend(
        name: str,
        globals: Optional[Mapping[str, Any]] = None,
        locals: Optional[Mapping[str, Any]] = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        try:
            return load(name, globals, locals, fromlist, level)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            asking = str((globals or {}).get("__file__") or "")
            if level or missing not in stand_ins or not is_users(asking):
                leave_no_frame(error)
                raise
            # A module of torch may be what lacks the package: torch.utils.tensorboard.
            whole = served_as(name, missing)
            note(f"{missing} ({stand_ins[missing].what})")
            top = name.partition(".")[0]
            if fromlist:
                return whole
            return sys.modules[top] if top in sys.modules else served_as(top, missing)
        except BaseException as error:
            leave_no_frame(error)
            raise

    builtins.__import__ = import_or_pretend
