"""What ``torch.cuda`` and ``torch.accelerator`` return under the stand-in."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import uuid
from abc import ABCMeta
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn, Optional

# What the stand-in cannot serve: an error with its name, at the user's line.


class StandInGap(RuntimeError):
    """The script needs something that only a real GPU has."""


def standing_for(name: str, real: Any) -> Any:
    """Return what stands in the place of ``real``, by its ``name`` as the user would spell it, until it is used.

    A function for a function, and a class for a class: a subclass of the real one, so that annotations
    (``CUDAGraph | None``) and ``isinstance`` go on as before.
    """
    return _class(name, real) if isinstance(real, type) else _function(name)


def _class(name: str, real: type) -> type:
    class NotServed(real):  # type: ignore[misc]
        """A class that raises when an object is made of it."""

        def __new__(cls, *arguments: Any, **options: Any) -> Any:  # noqa: ARG004 - those of the real one
            _refuse(name)

    NotServed.__name__, NotServed.__qualname__ = real.__name__, real.__qualname__
    NotServed.__module__ = real.__module__
    return NotServed


def _function(name: str) -> Callable[..., Any]:
    def not_served(*arguments: Any, **options: Any) -> NoReturn:
        _refuse(name)

    return not_served


def _refuse(name: str) -> NoReturn:
    raise StandInGap(f"{name} needs a real GPU; the CUDA stand-in of this rehearsal cannot emulate it")


# Streams and events of the stand-in: everything is done when the call returns, so waiting is nothing.


def _return_at_once(self: Any, other: Any = None) -> None:
    """Wait for nothing: nothing runs behind the caller's back."""


def stream_classes(torch: Any, devices: Devices) -> dict[str, Any]:
    """Return ``Stream``, ``ExternalStream``, ``Event`` and the context manager ``StreamContext`` of ``torch.cuda``."""

    class Event:
        """A moment of the CPU's clock."""

        def __init__(
            self,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> None:
            self.enable_timing = enable_timing
            self._time_s: Optional[float] = None

        wait = synchronize = _return_at_once

        def record(self, stream: Any = None) -> None:
            self._time_s = time.perf_counter()

        def query(self) -> bool:
            return True

        def elapsed_time(self, end_event: Any) -> float:
            """Return the milliseconds between two recorded events; raise what CUDA raises when one lacks."""
            if not (self.enable_timing and end_event.enable_timing):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if self._time_s is None or end_event._time_s is None:
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            return float((end_event._time_s - self._time_s) * 1000.0)

    class Stream:
        """A queue that is always empty."""

        def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
            self.device_index = devices.checked(devices.index(device))
            self.device = torch.device("cuda", self.device_index)
            self.priority = priority
            self.cuda_stream = self.stream_id = id(self)

        wait_event = wait_stream = synchronize = _return_at_once

        def record_event(self, event: Any = None) -> Any:
            event = Event() if event is None else event
            event.record(self)
            return event

        def query(self) -> bool:
            return True

        def is_capturing(self) -> bool:
            return False

        def __enter__(self) -> Any:
            self._entered = StreamContext(self)
            self._entered.__enter__()
            return self

        def __exit__(self, *exception: Any) -> None:
            self._entered.__exit__(*exception)

    class ExternalStream(Stream):
        """A stream that another library made."""

        def __init__(self, stream_ptr: int, device: Any = None, **options: Any) -> None:
            super().__init__(device)

    class StreamContext:
        """A context manager that makes a stream, and its device, the current one."""

        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            if self.stream is not None:
                self._former = current_stream(), devices.current
                current[devices.current] = self.stream
                devices.exchange(self.stream.device_index)
                current[devices.current] = self.stream

        def __exit__(self, *exception: Any) -> None:
            if self.stream is not None:
                stream, index = self._former
                current.pop(devices.current, None)
                devices.exchange(index)
                current[index] = stream

    _pass_for_bases(Event, Stream)
    default: dict[int, Any] = {}
    current: dict[int, Any] = {}

    def default_stream(device: Any = None) -> Any:
        index = devices.checked(devices.index(device))
        if index not in default:
            default[index] = Stream(index)
        return default[index]

    def current_stream(device: Any = None) -> Any:
        index = devices.checked(devices.index(device))
        return current.get(index) or default_stream(index)

    def set_stream(stream: Any) -> None:
        if stream is not None:
            current[stream.device_index] = stream

    return {
        "Event": Event,
        "Stream": Stream,
        "ExternalStream": ExternalStream,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "default_stream": default_stream,
        "current_stream": current_stream,
        "set_stream": set_stream,
    }


def _pass_for_bases(event: type, stream: type) -> None:
    """Register the classes as those that torch._dynamo, which optimizers import, expects; torch 2.6 expects none."""
    bases = sys.modules.get("torch._streambase")
    for name, served in (("_EventBase", event), ("_StreamBase", stream)):
        base = getattr(bases, name, None)
        if isinstance(base, ABCMeta):
            base.register(served)


def for_any_device(real: type, served: type, devices: Devices) -> type:
    """Serve ``torch.Stream`` or ``torch.Event`` where a GPU is named, or no device, which means one."""

    class OfAnyDevice(type):
        """A class of which the objects are of other classes, and count as its own."""

        def __call__(cls, device: Any = None, *arguments: Any, **options: Any) -> Any:
            if device is not None and not devices.is_cuda(device):
                return real(device, *arguments, **options)
            index = devices.checked(devices.index(device))
            return served(index, *arguments, **options) if "Stream" in real.__name__ else served(**options)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, (real, served))

    return OfAnyDevice(real.__name__, (), {"__module__": real.__module__})


NAME = "CUDA stand-in"
MEMORY_BYTES = 16 * 2**30
"""Memory of every pretended GPU."""
CAPABILITY = (8, 0)
"""Of a GPU that has bfloat16 and TF32, which training scripts test for."""

_ZEROS = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached",
    "max_memory_cached", "device_memory_used", "utilization", "memory_usage", "temperature", "power_draw",
    "clock_rate",
)  # fmt: skip
_NOTHING = (
    "init", "_lazy_init", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "reset_accumulated_memory_stats",
    "reset_max_memory_allocated", "reset_max_memory_cached", "set_per_process_memory_fraction", "set_sync_debug_mode",
    "_sleep", "_record_memory_history", "_dump_snapshot",
)  # fmt: skip
_NOT_SERVED = (
    "CUDAGraph", "graph", "make_graphed_callables", "MemPool", "caching_allocator_alloc", "caching_allocator_delete",
    "change_current_allocator", "cudart", "memory_snapshot",
)  # fmt: skip

_BEHIND = {
    "_cuda_setDevice": "set_device",
    "_cuda_getDevice": "current_device",
    "_cuda_exchangeDevice": "_exchange_device",
    "_cuda_maybeExchangeDevice": "_maybe_exchange_device",
    "_cuda_synchronize": "synchronize",
    "_cuda_emptyCache": "empty_cache",
}
"""What a torch with CUDA has in ``torch._C``, as far as others than torch itself call it, and what stands for it."""


def install(torch: Any, devices: Devices) -> None:
    """Put the stand-ins in the place of the functions, in ``torch.cuda`` and the modules behind it."""
    cuda = torch.cuda
    answers: dict[str, Any] = {
        **_queries(torch, devices),
        **_device_choice(devices),
        **_random_numbers(torch, devices),
        **stream_classes(torch, devices),
        **{name: _always(0) for name in _ZEROS},
        **{name: _always(None) for name in _NOTHING},
        **{
            name: standing_for(f"torch.cuda.{name}", getattr(cuda, name)) for name in _NOT_SERVED if hasattr(cuda, name)
        },
    }
    for module in (cuda, cuda.memory, cuda.random, cuda.streams, cuda.graphs):
        _put(module, answers)
    for name, behind in _BEHIND.items():
        setattr(torch._C, name, _another(answers[behind]))
    _put(cuda.nvtx, dict.fromkeys(("range_push", "range_pop", "mark", "range_start", "range_end"), _always(0)))
    _put(cuda.profiler, dict.fromkeys(("start", "stop", "init"), _always(None)))
    for name in ("Stream", "Event"):
        if hasattr(torch, name):
            setattr(torch, name, for_any_device(getattr(torch, name), answers[name], devices))
    if hasattr(torch, "accelerator"):
        _accelerator(torch, devices, answers)


def _put(owner: Any, answers: dict[str, Any]) -> None:
    """Put answers in the place of what this torch has of these names."""
    for name, answer in answers.items():
        if hasattr(owner, name):
            setattr(owner, name, answer)


def _another(function: Any) -> Any:
    """Return a function of its own that does the same: ``torch.compile`` refuses one that stands under two names."""

    def same(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    return same


def _always(value: Any) -> Any:
    def answer(*arguments: Any, **options: Any) -> Any:
        return value

    return answer


def _queries(torch: Any, devices: Devices) -> dict[str, Any]:
    """Return the queries of the machine."""

    def properties(device: Any = None) -> Any:
        index = devices.checked(devices.index(device))
        return SimpleNamespace(
            name=NAME,
            uuid=uuid.UUID(int=index),
            major=CAPABILITY[0],
            minor=CAPABILITY[1],
            total_memory=MEMORY_BYTES,
            multi_processor_count=1,
            warp_size=32,
            max_threads_per_multi_processor=2048,
            max_threads_per_block=1024,
            regs_per_multiprocessor=65536,
            shared_memory_per_block=48 * 2**10,
            shared_memory_per_block_optin=163 * 2**10,
            shared_memory_per_multiprocessor=164 * 2**10,
            L2_cache_size=40 * 2**20,
            is_integrated=False,
            is_multi_gpu_board=False,
            gcnArchName="",
        )

    def for_device(value: Any) -> Any:
        def answer(device: Any = None) -> Any:
            devices.checked(devices.index(device))
            return value

        return answer

    return {
        "is_available": lambda: devices.count() > 0,
        "device_count": devices.count,
        "is_initialized": lambda: devices.in_use,
        "is_bf16_supported": _always(True),
        "is_tf32_supported": _always(True),
        "is_current_stream_capturing": _always(False),
        "get_device_name": for_device(NAME),
        "get_device_capability": for_device(CAPABILITY),
        "get_device_properties": properties,
        "get_arch_list": lambda: ["sm_80"],
        "get_gencode_flags": _always(""),
        "get_sync_debug_mode": _always(0),
        "can_device_access_peer": _always(True),
        "mem_get_info": for_device((MEMORY_BYTES, MEMORY_BYTES)),
        "memory_stats": lambda device=None: _Zeros(),
        "host_memory_stats": lambda: _Zeros(),
        "get_allocator_backend": _always("native"),
        "memory_stats_as_nested_dict": lambda device=None: {},
        "memory_summary": lambda device=None, abbreviated=False: f"no GPU memory: {NAME}",
        "list_gpu_processes": lambda device=None: "no processes",
        "synchronize": for_device(None),
    }


class _Zeros(dict):  # type: ignore[type-arg]
    """Memory statistics: every counter is 0."""

    def __missing__(self, key: object) -> int:
        return 0


def _device_choice(devices: Devices) -> dict[str, Any]:
    """Return the current device, and the ways to choose another."""

    class device:  # noqa: N801 - its name in torch
        """Context manager that changes the current device."""

        def __init__(self, device: Any) -> None:
            self.idx = devices.index(device, optional=True)
            self.prev_idx = -1

        def __enter__(self) -> None:
            self.prev_idx = devices.exchange(self.idx)

        def __exit__(self, *exception: Any) -> None:
            self.idx = devices.exchange(self.prev_idx)

    class device_of(device):  # noqa: N801 - its name in torch
        """The device of a tensor; every tensor here is on the CPU, which changes nothing."""

        def __init__(self, obj: Any) -> None:
            super().__init__(-1)

    return {
        "current_device": lambda: devices.checked(devices.current),
        "set_device": devices.select,
        "_exchange_device": devices.exchange,
        "_maybe_exchange_device": devices.exchange,
        "device": device,
        "device_of": device_of,
    }


def _random_numbers(torch: Any, devices: Devices) -> dict[str, Any]:
    """Return the generators of the pretended GPUs; they leave alone those of the CPU, which draw."""
    generators: dict[int, Any] = {}

    def generator(device: Any = "cuda") -> Any:
        index = devices.checked(devices.index(device))
        if index not in generators:
            generators[index] = torch.Generator()
        return generators[index]

    def manual_seed_all(seed: int) -> None:
        for index in range(devices.count()):
            generator(index).manual_seed(int(seed))

    def seed_all() -> None:
        for index in range(devices.count()):
            generator(index).seed()

    def set_rng_state_all(states: Any) -> None:
        for index, state in enumerate(states):
            generator(index).set_state(state)

    return {
        "manual_seed": lambda seed: generator(None).manual_seed(int(seed)) and None,
        "manual_seed_all": manual_seed_all,
        "seed": lambda: generator(None).seed() and None,
        "seed_all": seed_all,
        "initial_seed": lambda: generator(None).initial_seed(),
        "get_rng_state": lambda device="cuda": generator(device).get_state(),
        "set_rng_state": lambda new_state, device="cuda": generator(device).set_state(new_state) and None,
        "get_rng_state_all": lambda: [generator(index).get_state() for index in range(devices.count())],
        "set_rng_state_all": set_rng_state_all,
    }


def _accelerator(torch: Any, devices: Devices, answers: dict[str, Any]) -> None:
    """Serve ``torch.accelerator`` with the same GPUs."""

    @contextlib.contextmanager
    def device_index(index: Any) -> Iterator[None]:
        former = devices.exchange(-1 if index is None else int(index))
        try:
            yield
        finally:
            devices.exchange(former)

    replaced = {
        "is_available": answers["is_available"],
        "device_count": devices.count,
        "current_accelerator": lambda check_available=False: torch.device("cuda") if devices.count() else None,
        "current_device_index": answers["current_device"],
        "current_device_idx": answers["current_device"],
        "set_device_index": devices.select,
        "set_device_idx": devices.select,
        "current_stream": answers["current_stream"],
        "set_stream": answers["set_stream"],
        "synchronize": answers["synchronize"],
        "get_device_capability": answers["get_device_capability"],
        "device_index": device_index,
        **{name: answers[name] for name in (*_ZEROS, *_NOTHING, "memory_stats") if name in answers},
    }
    _put(torch.accelerator, replaced)


# The GPUs that the stand-in pretends: how many, which is current, and what a device that a user names becomes.

CUDA = "cuda"
NO_SUCH_GPU = "invalid device ordinal"
"""CUDA's error for a GPU that the node lacks."""


class Devices:
    """The GPUs of one process, and the translation of devices to the CPU."""

    def __init__(self, torch: Any, count: int, note_use: Callable[[int, str], object], *, known: bool = True) -> None:
        """With ``known`` the layout gives the GPUs of a node; otherwise the node of the job may have more."""
        self._torch = torch
        self._present = count
        self._known = known
        self._note_use = note_use
        """Called with an index and how it was chosen (``explicit``, ``current``) at the first such use."""
        self._used: set[tuple[int, str]] = set()
        self._current = threading.local()
        self._visible: Optional[int] = None
        self._error: type = getattr(torch, "AcceleratorError", RuntimeError)
        self.cpu = torch.device("cpu")
        self.was_set = False
        """``set_device`` was called, or a device context entered."""
        self.used_by_parent = False
        """The process that forked this one had put something on a GPU, which no GPU context outlives."""
        os.register_at_fork(after_in_child=self._begin_as_child)

    def _begin_as_child(self) -> None:
        self.used_by_parent = bool(self._used) or self.used_by_parent
        self._used.clear()

    @property
    def in_use(self) -> bool:
        """A device was selected or used, before which a device mesh selects one by itself."""
        return self.was_set or bool(self._used)

    def count(self) -> int:
        """Return the GPUs that the process sees; ``CUDA_VISIBLE_DEVICES`` is read once, as CUDA does."""
        if self._visible is None:
            named = os.environ.get("CUDA_VISIBLE_DEVICES")
            self._visible = self._present if named is None else self._usable(named)
        return self._visible

    def _usable(self, named: str) -> int:
        """Return the entries up to the first without a GPU: a job's node may well have the GPUs 4 and 5."""
        usable = 0
        for entry in named.split(","):
            text = entry.strip()
            if self._known and text.isdigit() and int(text) >= self._present:
                break
            if not text or text == "-1":
                break
            usable += 1
        return min(usable, self._present)

    @property
    def current(self) -> int:
        """The current device of this thread; 0 in a new thread, as in CUDA."""
        return getattr(self._current, "index", 0)

    def select(self, device: Any) -> None:
        """Make a device the current one; a negative index changes nothing, as in torch."""
        index = self.index(device, optional=True)
        if index >= 0:
            self._current.index = self.checked(index)
            self.was_set = True

    def exchange(self, index: int) -> int:
        """Make a device the current one and return the former; -1 changes nothing."""
        former = self.current
        if index >= 0:
            self._current.index = self.checked(index)
            self.was_set = True
        return former

    def index(self, device: Any, optional: bool = False) -> int:
        """Return the index of a device, a string, a number or None; raise ValueError for what is no CUDA device."""
        if device is None:
            return self.current
        if isinstance(device, bool) or not isinstance(device, (int, str, self._torch.device)):
            raise ValueError(f"Expected a torch.device with a specified index or an integer, but got: {device}")
        if isinstance(device, int):
            return device
        parsed = self._torch.device(device)
        if parsed.type != CUDA:
            if optional and parsed.type == "cpu":
                return -1
            if device == self.cpu and not isinstance(device, str):
                return self.current  # where a tensor is, which would be a GPU
            raise ValueError(f"Expected a cuda device, but got: {device}")
        return self.current if parsed.index is None else int(parsed.index)

    def checked(self, index: int) -> int:
        """Return the index, where there is such a GPU; otherwise raise the error that CUDA raises."""
        if not 0 <= index < self.count():
            if self.count() == 0:
                raise RuntimeError("No CUDA GPUs are available")
            raise self._error(
                f"CUDA error: {NO_SUCH_GPU}\n"
                f"(device {index} was asked for; the node of this rehearsal has {self.count()})"
            )
        return index

    def is_cuda(self, device: Any) -> bool:
        """Return whether a device argument names CUDA; a bare index means the accelerator."""
        if isinstance(device, self._torch.device):
            return bool(device.type == CUDA)
        if isinstance(device, str):
            return device == CUDA or device.startswith("cuda:")
        return isinstance(device, int) and not isinstance(device, bool)

    def on_cpu(self, device: Any) -> Any:
        """Return the CPU for a CUDA device that exists, any other argument itself; raise what CUDA would raise."""
        if not self.is_cuda(device):
            return device
        self.use(device)
        return self.cpu

    def use(self, device: Any) -> int:
        """Check a device that a tensor goes to, note its first use, and return its index."""
        index = self.checked(self.index(device))
        named = device is not None and (isinstance(device, int) or self._torch.device(device).index is not None)
        key = (index, "explicit" if named else "current")
        if key not in self._used:
            self._used.add(key)
            self._note_use(*key)
        return index
