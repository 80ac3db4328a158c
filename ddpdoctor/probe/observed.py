"""Facts of the user's objects, as a watched job and a rehearsal write them: wraps, loaders, optimizers, tensors."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import sys
import time
from array import array
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, Callable, Optional
from weakref import ReferenceType, ref

from .journal import Journal
from .torch_compat import on_call
from .user_code import UserCode, leave_no_frame

# What is known of a module when DistributedDataParallel wraps it.

_DDP_OPTIONS = (
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
    for option in _DDP_OPTIONS:
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
        "texts": dict(_texts_of(module)),
    }


_MOST_LISTS = 50
_MOST_TEXTS = 200


def _texts_of(module: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield the short lists of texts that a module and its parts hold: their order may say what a part stands for."""
    found = 0
    for path, part in module.named_modules():
        for name, held in vars(part).items():
            listed = type(held) in (list, tuple, dict) and 1 < len(held) <= _MOST_TEXTS and not name.startswith("_")
            if listed and all(type(item) is str for item in held):
                found += 1
                yield ".".join(filter(None, (path, name))), [item[:80] for item in held]
            if found == _MOST_LISTS:
                return


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


# The methods that read a tensor's value: each waits until its GPU has done all that was queued.

HOST_READS = ("item", "cpu", "tolist", "__bool__", "__float__", "__int__")
_PRINTING = ("/torch/_tensor_str.py", "/torch/_tensor.py")
"""The files of torch through which a tensor is printed or formatted."""
_now_ns = time.monotonic_ns


def follow_reads(
    journal: Journal,
    tensor_class: Any,
    is_watched: Callable[[], bool],
    note: Callable[[str, Any, FrameType, int], None],
) -> dict[str, tuple[Any, Any]]:
    """Pass each watched read to ``note``: its method, the tensor, the frame that reads, and how long it took.

    Return what was put in the place of each method, and what the class itself had there; None for what it inherits.
    """
    installed: dict[str, tuple[Any, Any]] = {}
    for name in HOST_READS:
        method = getattr(tensor_class, name, None)
        if method is not None:
            replacement = _followed(journal, name, method, is_watched, note)
            installed[name] = replacement, tensor_class.__dict__.get(name)
            setattr(tensor_class, name, replacement)
    return installed


def _followed(
    journal: Journal,
    name: str,
    method: Callable[..., Any],
    is_watched: Callable[[], bool],
    note: Callable[[str, Any, FrameType, int], None],
) -> Callable[..., Any]:
    @functools.wraps(method)
    def read(tensor: Any, *arguments: Any, **options: Any) -> Any:
        if not is_watched():
            return method(tensor, *arguments, **options)
        begun_ns = _now_ns()
        try:
            return method(tensor, *arguments, **options)
        except BaseException as error:
            leave_no_frame(error)
            raise
        finally:
            took_ns = _now_ns() - begun_ns
            journal.guarded(note, name, tensor, sys._getframe(1), took_ns, harms=("host_reads", "tensor_reads"))

    return read


def user_reader(frame: Optional[FrameType], user_code: UserCode) -> Optional[FrameType]:
    """Return the user's frame that reads a tensor at ``frame``, by printing it too; None where a library does."""
    while frame is not None and frame.f_code.co_filename.endswith(_PRINTING):
        frame = frame.f_back
    return frame if frame is not None and user_code.holds(frame.f_code.co_filename) else None


# How much memory the parameters of an optimizer, their gradients and its own state take, reported once.

MEASURED_AT_STEP = 3
"""By then every parameter that will get a state has one."""
MOST_OPTIMIZERS = 64


class OptimizerSizes:
    """The steps of optimizers until they are measured; after that a step costs one look into a dictionary."""

    def __init__(
        self, journal: Journal, torch: Any, at_step: int = MEASURED_AT_STEP, *, any_device: bool = False
    ) -> None:
        """Measure what is on a GPU or, where the CPU stands in for one (``any_device``), everything."""
        self._journal = journal
        self._torch = torch
        self._at_step = at_step
        self._any_device = any_device
        self._steps: dict[int, int] = {}
        self.measured: set[int] = set()
        """Identities of optimizers that are measured."""
        self._counted: dict[int, ReferenceType[Any]] = {}
        """Parameters that were counted, by identity: an optimizer inside another one steers some of the same."""

    def stepped(self, optimizer: Any) -> None:
        """Count a step of an optimizer, and measure it at the step that is due."""
        made = self._steps.get(id(optimizer), 0) + 1
        if made > self._at_step or len(self._steps) >= MOST_OPTIMIZERS:
            return
        self._steps[id(optimizer)] = made
        if made == self._at_step:
            self.measured.add(id(optimizer))
            self._measure(optimizer)

    def _measure(self, optimizer: Any) -> None:
        parameters = list(filter(self._is_new, parameters_of(optimizer)))
        held = (value for state in optimizer.state.values() for value in _values(state))
        self._journal.event(
            "optimizer_size",
            type=type(optimizer).__name__,
            parameter_bytes=self._bytes(parameters),
            gradient_bytes=self._bytes(parameter.grad for parameter in parameters),
            state_bytes=self._bytes(held),
            shares_state=_shares_state(optimizer),
            device_memory_bytes=self._device_memory(parameters),
        )

    def _is_new(self, parameter: Any) -> bool:
        known = self._counted.get(id(parameter))
        if known is not None and known() is parameter:
            return False
        self._counted[id(parameter)] = ref(parameter)
        return True

    def _bytes(self, values: Iterable[Any]) -> int:
        return sum(
            value.numel() * value.element_size()
            for value in values
            if isinstance(value, self._torch.Tensor) and (self._any_device or value.is_cuda)
        )

    def _device_memory(self, parameters: Iterable[Any]) -> int:
        """Return the memory of the GPU that holds the parameters; 0 where none does."""
        device = next((parameter.device for parameter in parameters if parameter.is_cuda), None)
        return 0 if device is None else int(self._torch.cuda.get_device_properties(device).total_memory)


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters that an optimizer steps, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _values(state: Any) -> Iterator[Any]:
    yield from state.values() if isinstance(state, dict) else ()


def _shares_state(optimizer: Any) -> bool:
    """Return whether each rank's optimizer holds a share of the state, and an inner one does the work."""
    sharding = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    return sharding is not None and isinstance(optimizer, sharding)


# What is known of a DataLoader when it is made.


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
        "sampler_replicas": _number(sampler, *_REPLICAS),
        "sampler_seed": _number(sampler, "seed"),
        "sampler_within": _divider_within(sampler),
        "sampler_shuffles": _shuffles(sampler or loader.sampler),
        "batch_size": _batch_size(loader, torch),
        "workers": loader.num_workers,
        "persistent": bool(getattr(loader, "persistent_workers", False)),
    }


def sharding_sampler(loader: Any) -> Any:
    """Return the sampler or batch sampler of a loader that divides by rank; None when there is none."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for candidate in (getattr(batch_sampler, "sampler", None), batch_sampler, getattr(loader, "sampler", None)):
        if _knows_ranks(candidate):
            return candidate
    return None


_REPLICAS = ("num_replicas", "num_processes", "world_size")


def _knows_ranks(sampler: Any) -> bool:
    names = zip(_REPLICAS, ("rank", "process_index", "rank"))
    return any(hasattr(sampler, replicas) and hasattr(sampler, rank) for replicas, rank in names)


def _divider_within(sampler: Any) -> str:
    """Return the class of what divides by the same number of ranks beneath a sampler that does; empty of nothing."""
    one, names = sampler, ("sampler", "batch_sampler", "_sampler", "dataset")  # Lightning's has it as a data set.
    for _ in range(8):
        held = getattr(one, "__dict__", {})
        one = next((held[name] for name in names if held.get(name) is not None), None)
        if _knows_ranks(one) and _number(one, *_REPLICAS) == _number(sampler, *_REPLICAS):
            return type(one).__qualname__
    return ""


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


# Counts the open `join()` contexts: inside of one the ranks may draw different numbers of batches.


class Joins:
    """The enabled contexts of this process."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.open = 0

    def install(self) -> None:
        """Listen to the class, where this torch has it."""
        try:
            from torch.distributed.algorithms.join import Join
        except ImportError:
            return
        on_call(self._journal, Join, "__enter__", before=self._entered, harms=("passes",))
        on_call(self._journal, Join, "__exit__", before=self._left, harms=("passes",))

    def _entered(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.open += bool(getattr(arguments[0], "_enable", True))

    def _left(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.open -= bool(getattr(arguments[0], "_enable", True))


# The indices that samplers draw, as numbers that can be written and compared.


def integers(index: Any) -> list[int]:
    """Return an index or a batch of them as 64-bit integers; other keys by their hash."""
    if isinstance(index, (list, tuple)):
        return [number for item in index for number in integers(item)]
    try:
        return [int(index)]
    except (TypeError, ValueError):
        return [int.from_bytes(hashlib.blake2b(repr(index).encode(), digest_size=7).digest(), "big")]


def base_of(dataset: Any, torch: Any) -> Any:
    """Return the data set beneath any ``Subset``."""
    while isinstance(dataset, torch.utils.data.Subset):
        dataset = dataset.dataset
    return dataset


def base_indices(dataset: Any, drawn: array[int], torch: Any) -> array[int]:
    """Return the indices in the data set beneath any ``Subset``."""
    while isinstance(dataset, torch.utils.data.Subset):
        subset = dataset.indices
        drawn = array("q", [int(subset[index]) for index in drawn])
        dataset = dataset.dataset
    return drawn


def digest_of(content: bytes) -> str:
    """Return a short digest of some bytes."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


# What a collective is, alike in every record: who issued it, and the fields of its signature.


WHOLE_UP_TO_BYTES = 1 << 20
"""Larger inputs are digested by a sample of their bytes."""
PIECES = 16
"""A sample is made of so many pieces, spread evenly, the head and the tail among them."""
_MOST_LEAVES = 64


def tensor_digest(tensor: Any, most_bytes: Optional[int] = None) -> str:
    """Return a digest of a tensor's type, shape and bytes, of at most so many; empty when they cannot be read."""
    try:
        # What only wraps other tensors (a sharded one, say) has no bytes of its own behind its address: reading them
        # would kill the process.
        if type(tensor).__torch_dispatch__ is not sys.modules["torch"].Tensor.__torch_dispatch__:
            return ""
        flat = tensor.detach().cpu().contiguous()
        size = flat.numel() * flat.element_size()
        digest = hashlib.blake2b(f"{flat.dtype}{tuple(flat.shape)}".encode(), digest_size=8)
        if size:
            address = flat.data_ptr()
            if not address:
                return ""
            content = memoryview((ctypes.c_char * size).from_address(address))
            if most_bytes is None or size <= most_bytes:
                digest.update(content)
            else:
                length = max(1, most_bytes // PIECES)
                for piece in range(PIECES):
                    start = (size - length) * piece // (PIECES - 1)
                    digest.update(content[start : start + length])
        return digest.hexdigest()
    except (RuntimeError, NotImplementedError, AttributeError, KeyError, TypeError, ValueError):
        return ""


def leaves(value: Any, torch: Any) -> tuple[str, ...]:
    """Return digests of the tensors, arrays, numbers and strings in a sample, in a fixed order."""
    found: list[str] = []
    _collect(value, torch, found, 0)
    return tuple(found)


def _collect(value: Any, torch: Any, found: list[str], depth: int) -> None:
    if len(found) >= _MOST_LEAVES or depth > 6:
        return
    if isinstance(value, torch.Tensor):
        found.append(tensor_digest(value, WHOLE_UP_TO_BYTES))
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            _collect(value[key], torch, found, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, torch, found, depth + 1)
    elif isinstance(value, (str, bytes, int, float, bool, complex)) or value is None:
        found.append(digest_of(repr(value).encode()))
    elif hasattr(value, "tobytes"):
        found.append(digest_of(value.tobytes()[:WHOLE_UP_TO_BYTES]))
    elif hasattr(value, "__dict__"):
        _collect(vars(value), torch, found, depth + 1)
    else:
        found.append("")
