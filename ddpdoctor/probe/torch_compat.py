"""What the torch that is there can do, and what waits for its import."""

from __future__ import annotations

import ctypes
import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import Any, Optional

from .journal import Journal
from .user_code import leave_no_frame

RATE_SETTER = "_set_ddp_runtime_logging_sample_rate"
"""The name of what sets how many iterations DDP's reducer measures."""
_COSTS = {
    "_BaseDataLoaderIter": "the wait for data is not measured",
    "_next_index": "the indices that samplers draw are not compared",
    "Logger": "exposed communication is not measured",
    RATE_SETTER: "exposed communication is measured on few steps only",
    "_sync_buffers": "DDP's broadcast of buffers counts as forward",
    "Work.wait": "waiting for asynchronous collectives is not measured",
    "is_dynamo_compiling": "compiled code may run slower",
    "_dump_fr_trace": "before torch 2.8 no flight recorder holds the collectives of gloo",
    "_dump_fr_trace_json": "collectives of gloo that are under way are not counted before torch 2.8",
}
"""What a missing name means for the user."""


class Capabilities:
    """What this torch offers; None where it does not."""

    def __init__(self, torch: Any) -> None:
        self.missing: dict[str, str] = {}
        """Names that were not found, and what that means."""
        c10d = getattr(torch._C, "_distributed_c10d", None)
        ddp_class = torch.nn.parallel.DistributedDataParallel
        self.loader_iterator: Any = self._need(torch.utils.data.dataloader, "_BaseDataLoaderIter")
        self.draws_indices = self._need(self.loader_iterator, "_next_index") is not None
        self.make_logger: Optional[Callable[[Any], Any]] = self._need(c10d, "Logger")
        self.set_logger_rate: Optional[Callable[[Any, int], None]] = self._need(
            getattr(c10d, "Reducer", None), RATE_SETTER
        )
        self.synchronise_buffers: Optional[Callable[[Any], None]] = self._need(ddp_class, "_sync_buffers")
        self.work_class: Any = getattr(c10d, "Work", None)
        if getattr(self.work_class, "wait", None) is None:
            self.work_class = None
            self._lack("Work.wait")
        # One call, where torch's `is_compiling` makes two: it is made several times a step.
        self.is_compiling: Callable[[], bool] = (
            self._need(getattr(torch, "compiler", None), "is_dynamo_compiling") or _is_never_compiling
        )
        # NCCL's collectives have a recorder of their own, which is the older one: torch 2.4 to 2.7 have no other.
        self.recorders = self._recorders(c10d, "_dump_fr_trace", "_dump_nccl_trace")
        """Functions that give torch's flight recorders with all that is in them, as pickles."""
        self.recorder_states = self._recorders(c10d, "_dump_fr_trace_json", "_dump_nccl_trace_json")
        """The same as JSON, for their counts."""

    def _need(self, owner: Any, name: str) -> Any:
        found = getattr(owner, name, None)
        if found is None:
            self._lack(name)
        return found

    def _lack(self, name: str) -> None:
        self.missing[name] = _COSTS[name]

    def _recorders(self, c10d: Any, name: str, older: str) -> tuple[Callable[..., bytes], ...]:
        return tuple(function for function in (self._need(c10d, name), getattr(c10d, older, None)) if function)


SHARDED_STATES = ("torch.distributed.fsdp._fully_shard._fsdp_state", "torch.distributed._composable.fsdp._fsdp_state")
"""Where torch keeps the state of ``fully_shard``: now, and until 2.5."""


def _is_never_compiling() -> bool:
    return False


class _AfterImport(importlib.abc.Loader):
    """A module's own loader with a call back after it."""

    def __init__(self, loader: importlib.abc.Loader, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Optional[ModuleType]:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        module.__loader__ = self._loader
        if spec is not None:
            spec.loader = self._loader
        self._loader.exec_module(module)
        self._finder.imported(module)


class _Finder(importlib.abc.MetaPathFinder):
    """A finder for one module name until it is imported, which uses the finders behind it.

    A library may only test for such a module (``importlib.util.find_spec("torch")``, as ``datasets``), and import
    it later.
    """

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._callback = callback

    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if fullname != self._name:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :] if self in sys.meta_path else []
        for finder in behind:
            if not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _AfterImport(spec.loader, self)
                return spec
        return None

    def imported(self, module: ModuleType) -> None:
        """Call back, as the import has finished."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._callback(module)


def after_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call ``callback`` with the module called ``name`` when its import has finished; at once if it already has."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        callback(module)
    else:
        sys.meta_path.insert(0, _Finder(name, callback))


def replaces(name: str, *owners: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put the decorated function in the place of ``name`` in each of ``owners``; its first argument is the original.

    A class method, which gets the class next, and a static method stay what they are.
    """
    held = vars(owners[0]).get(name)
    kind: Optional[type] = type(held) if isinstance(held, (classmethod, staticmethod)) else None
    original = getattr(owners[0], name) if kind is None else held.__func__

    def put(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def called(*arguments: Any, **options: Any) -> Any:
            return function(original, *arguments, **options)

        for owner in owners:
            setattr(owner, name, called if kind is None else kind(called))
        return called

    return put


# The one way to listen to calls of functions that are not ours, in a watched job and in a rehearsal alike.

Listener = Callable[[FrameType, tuple[Any, ...], dict[str, Any]], object]
"""Takes the frame that calls, and the arguments by position and by name; of a method the object is the first."""


def on_call(
    journal: Journal,
    owner: Any,
    name: str,
    *,
    before: Optional[Listener] = None,
    after: Optional[Listener] = None,
    harms: tuple[str, ...],
) -> None:
    """Call listeners before each call of ``owner.name``, and after it has returned.

    ``harms`` is that of ``Journal.guarded``. What a listener raises that is no ``Exception``, as the end of a rehearsal
    is, reaches the caller.
    """
    function = getattr(owner, name)

    @functools.wraps(function)
    def listened_to(*arguments: Any, **options: Any) -> Any:
        if before is not None:
            journal.guarded(before, sys._getframe(1), arguments, options, harms=harms)
        try:
            result = function(*arguments, **options)
        except BaseException as error:
            leave_no_frame(error)
            raise
        if after is not None:
            journal.guarded(after, sys._getframe(1), arguments, options, harms=harms)
        return result

    setattr(owner, name, listened_to)


def named_arguments(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names, without those that are left to their defaults."""
    return {**dict(zip(inspect.signature(function).parameters, arguments)), **options}


def in_place(tensor: Any, kind: Any, most: int = sys.maxsize) -> Any:
    """Return the first numbers of a tensor on the CPU where they lie, as an array of a ``kind`` of ctypes.

    It is good for as long as the tensor has this memory; empty where that was let go of, as a library may between
    steps: what is read then would end the process.
    """
    before = tensor.storage_offset() * tensor.element_size()
    room = min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes() - before)
    count = min(most, room // ctypes.sizeof(kind))
    return (kind * count).from_address(tensor.data_ptr()) if count > 0 else (kind * 0)()
