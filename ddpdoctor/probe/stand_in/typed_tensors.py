"""What no function mode sees: tensor types of CUDA, generators, checkpoints that remember a GPU."""

from __future__ import annotations

from typing import Any

from .devices import CUDA, Devices

TYPES = (
    "FloatTensor",
    "DoubleTensor",
    "HalfTensor",
    "BFloat16Tensor",
    "LongTensor",
    "IntTensor",
    "ShortTensor",
    "ByteTensor",
    "CharTensor",
    "BoolTensor",
)
BEFORE_TORCH = 5
"""Priority among what restores storages; torch's own begin at 10."""


def install(torch: Any, devices: Devices) -> None:
    """Replace types and generators, and restore storages of CUDA on the CPU."""
    for name in TYPES:
        if hasattr(torch, name):
            setattr(torch.cuda, name, getattr(torch, name))
    set_type = torch.set_default_tensor_type

    def set_default_tensor_type(kind: Any) -> None:
        set_type(kind.replace("torch.cuda.", "torch.") if isinstance(kind, str) else kind)

    torch.set_default_tensor_type = set_default_tensor_type
    # A stream of ours is refused before any mode is entered.
    torch.Tensor.record_stream = lambda self, stream: None
    _generators(torch, devices)
    _storages(torch, devices)


def _generators(torch: Any, devices: Devices) -> None:
    """Make ``torch.Generator(device="cuda")`` on the CPU; every generator is still one to ``isinstance``."""
    real = torch.Generator

    class Kind(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, real)

        def __subclasscheck__(cls, subclass: Any) -> bool:
            return issubclass(subclass, real)

    class Generator(metaclass=Kind):
        """A class that makes generators of torch."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return real(devices.on_cpu(device))

    # A generator is pickled with the class that has this name.
    Generator.__module__, Generator.__qualname__ = torch.__name__, "Generator"
    torch.Generator = Generator


def _storages(torch: Any, devices: Devices) -> None:
    """Restore a storage saved on ``cuda:1``, which needs that GPU when it is loaded without ``map_location``."""

    def restored(storage: Any, location: str) -> Any:
        if not (location == CUDA or location.startswith("cuda:")):
            return None
        index = devices.index(location)
        if not 0 <= index < devices.count():
            raise RuntimeError(
                f"Attempting to deserialize object on CUDA device {index} but torch.cuda.device_count() is "
                f"{devices.count()}. Please use torch.load with map_location to map your storages to an existing "
                "device."
            )
        return storage

    def moved(storage: Any, device: Any = None, non_blocking: bool = False) -> Any:
        devices.use(device)
        return storage

    torch.UntypedStorage.cuda = moved
    torch.storage.TypedStorage.cuda = moved
    torch.serialization.register_package(BEFORE_TORCH, lambda storage: None, restored)
