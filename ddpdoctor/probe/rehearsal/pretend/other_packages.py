"""Stand-ins for packages that a script imports and this machine lacks: trackers, apex, and those that only take."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple, Optional

from ...user_code import UserCode, leave_no_frame

# Experiment trackers that are not installed: modules that take everything and do nothing.

TRACKERS = frozenset(
    {
        "wandb", "mlflow", "neptune", "comet_ml", "clearml", "aim", "swanlab", "trackio", "visdom", "tensorboard",
        "tensorboardX", "tensorboard_logger",
    }
)  # fmt: skip
"""Top-level modules; what torch.utils.tensorboard lacks is one of them, too."""


class _Taking:
    """An object that takes every attribute, item and context."""

    def _given(self, part: str) -> Any:
        """Return what stands for a part of it: ``.name`` or ``[]``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._given(f".{name}")

    def __getitem__(self, key: object) -> Any:
        return self._given("[]")

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class Silent(_Taking):
    """An object that takes every call as well, and does nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def _given(self, part: str) -> Any:
        return Silent()

    def __call__(self, *arguments: Any, **options: Any) -> Any:  # noqa: D102 - it has nothing to say
        # As a decorator it gives back the function that it gets.
        alone = len(arguments) == 1 and not options and callable(arguments[0]) and not isinstance(arguments[0], type)
        return arguments[0] if alone and not isinstance(arguments[0], Silent) else Silent()

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


# Any package: what is given to it is taken, and who looks at what it gives misses the package.

TAKES_ALL = "takes everything and gives nothing"
_VALUES = "bool iter next len contains index int float complex fspath array bytes await torch_function"
_COMPARED = "eq ne lt le gt ge neg abs invert round"
_COMPUTED = "add sub mul matmul truediv floordiv mod pow"
_LOOKS = f"{_VALUES} {_COMPARED} {_COMPUTED} r{_COMPUTED.replace(' ', ' r')}".split()
"""The special methods by which a value enters what a script computes, decides or opens."""


class Unseen(_Taking):
    """What a package gives: it takes calls, attributes, items and contexts, is a type like any, and has no value."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *arguments: Any, **options: Any) -> Any:  # noqa: D102 - it has nothing to say
        if len(arguments) == 1 and not options and inspect.isroutine(arguments[0]):
            return arguments[0]  # a decorator's
        for one in (*arguments, *options.values()):
            for tensor in one if isinstance(one, (list, tuple)) else (one,):
                # Of a loss something comes back that is trained by.
                if getattr(tensor, "grad_fn", None) is not None:
                    self._missed()
        return Unseen(f"{self.__name__}()")

    def _given(self, part: str) -> Any:
        return Unseen(f"{self.__name__}{part}")

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return ()

    def __instancecheck__(self, one: object) -> bool:
        return False

    __subclasscheck__ = __instancecheck__

    def __or__(self, other: object) -> Any:
        return self

    __ror__ = __or__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return self.__name__

    def __format__(self, form: str) -> str:
        return self.__name__

    def _missed(self, *arguments: Any, **options: Any) -> Any:
        package = self.__name__.partition(".")[0]
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


for _look in _LOOKS:
    setattr(Unseen, f"__{_look}__", Unseen._missed)


def unseen_module(name: str) -> ModuleType:
    """Return the module of a dotted name in such a package."""
    module = ModuleType(name)
    vars(module).update(__all__=[], __path__=[], __getattr__=Unseen(name).__getattr__)
    return module


def _is_handled(user_code: UserCode) -> bool:
    """Return whether a file of the user's goes on where the import fails that is at work now."""
    frames = user_code.own(sys._getframe(2))
    return any(one.f_lineno in lines for one in frames for lines in _handled_lines(one.f_code.co_filename))


@functools.cache
def _handled_lines(file: str) -> tuple[range, ...]:
    """Return the lines of a file below which a failed import does not end the script."""
    with open(file, "rb") as source:
        tree = ast.parse(source.read())
    held = [
        node
        for node in ast.walk(tree)
        if (isinstance(node, ast.Try) and any(map(_continues, node.handlers)))
        or (isinstance(node, ast.With) and any("suppress" in ast.dump(item.context_expr) for item in node.items))
    ]
    return tuple(range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1) for node in held)


def _continues(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler takes the error of an import and raises none."""
    named = {getattr(node, "id", "") for node in ast.walk(handler.type)} if handler.type is not None else _OF_IMPORTS
    return not _OF_IMPORTS.isdisjoint(named) and not any(isinstance(node, ast.Raise) for node in handler.body)


_OF_IMPORTS = frozenset({"ModuleNotFoundError", "ImportError", "Exception", "BaseException"})


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
    stand_ins: Mapping[str, StandIn],
    user_code: UserCode,
    note: Callable[[str], None],
    others: Optional[StandIn] = None,
) -> None:
    """Serve the import statements of the user's files; libraries, which test what is installed, see nothing of it.

    ``others`` stands for every other package whose absence would end the script.
    """
    load = builtins.__import__
    served: dict[str, ModuleType] = {}

    def served_as(name: str, stand_in: StandIn) -> ModuleType:
        if name not in served:
            served[name] = stand_in.module(name)
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
            stand_in = stand_ins.get(missing)
            if stand_in is None and error.name == missing == name.partition(".")[0]:
                may_be = others is not None and not user_code.has_module(missing) and not _is_handled(user_code)
                stand_in = others if may_be else None
            if level or stand_in is None or not user_code.holds(asking):
                leave_no_frame(error)
                raise
            # A module of torch may be what lacks the package: torch.utils.tensorboard.
            whole = served_as(name, stand_in)
            note(f"{missing} ({stand_in.what})")
            top = name.partition(".")[0]
            if fromlist:
                return whole
            return sys.modules[top] if top in sys.modules else served_as(top, stand_in)
        except BaseException as error:
            leave_no_frame(error)
            raise

    builtins.__import__ = import_or_pretend
