"""Streams and events of the stand-in: everything is done when the call returns, so waiting is nothing."""

from __future__ import annotations

import sys
import time
from abc import ABCMeta
from typing import Any, Optional

from .devices import Devices


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

        def record(self, stream: Any = None) -> None:
            self._time_s = time.perf_counter()

        def wait(self, stream: Any = None) -> None:
            """Return at once: nothing runs behind the caller's back."""

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            """Return at once: nothing runs behind the caller's back."""

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

        def wait_event(self, event: Any) -> None:
            """Return at once: nothing runs behind the caller's back."""

        def wait_stream(self, stream: Any) -> None:
            """Return at once: nothing runs behind the caller's back."""

        def record_event(self, event: Any = None) -> Any:
            event = Event() if event is None else event
            event.record(self)
            return event

        def query(self) -> bool:
            return True

        def is_capturing(self) -> bool:
            return False

        def synchronize(self) -> None:
            """Return at once: nothing runs behind the caller's back."""

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
