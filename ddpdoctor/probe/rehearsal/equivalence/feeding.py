"""The batches of several ranks in the hands of one process: the ranks keep their samples, and it collates all of them.

Samples and not batches are joined, by the loader's own collating: padding, nesting and data classes are the script's.
A collating that draws random numbers cannot be repeated; then whole batches are joined along their first dimension.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import json
import os
import pickle
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, Callable, Optional

from ...journal import Journal
from ...observed import leaves, tensor_digest
from ...user_code import outwards

# What enters a loss beside parameters, and is neither made by code alone nor given to this process: data of its own.

MOST_NOTED = 256
"""Of a step; what comes after them is not compared."""
_MOST_MARKS = 4096
"""Of which those whose memory is freed are then forgotten."""
_SHIFTS = ("aten::add", "aten::sub", "aten::rsub")
"""Operators by which a number of Python is a target: one that only scales is a matter of the loss itself."""
_FACTORS = ("aten::mul", "aten::div")

GIVEN, MADE, COMPUTED = range(3)
"""Made by code or given to this process; data of its own; computed from parameters, or with other ranks. What is
computed of several is the last of them."""


class Entering:
    """Digests of a process' own data at the operators where it meets what has a gradient."""

    def __init__(self, journal: Journal, torch: Any) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._journal = journal
        self._torch = torch
        self._weakly = StorageWeakRef
        self._marks: dict[int, tuple[Any, int]] = {}
        """By storage, which is not freed in full, and its address not used again, while a weak reference is held."""
        self.noted: dict[str, tuple[str, int]] = {}
        """Since the last step, with file and line of the user's."""

    def mark(self, value: Any, kind: int) -> None:
        """Say what the tensors in a value are; what is known of their memory stays if it is more."""
        for tensor in self._tensors(value):
            self._set(tensor, max(kind, self._marked(tensor) or GIVEN))

    def see(self, name: str, arguments: Any, options: Any, result: Any) -> None:
        """Note what an operator of a forward pass is given."""
        if self._torch._C._current_graph_task_id() != -1:
            return
        tensors = list(self._tensors((arguments, options)))
        if name.startswith("c10d::"):
            together = "reduce" in name or "gather" in name
            self.mark([tensors, result], COMPUTED if together else MADE)
            return
        kinds = [self._kind(tensor) for tensor in tensors]
        for tensor in self._tensors(result):
            self._set(tensor, max(kinds, default=GIVEN))
        enabled = self._torch.is_grad_enabled()
        # The forward of a function with a backward of its own runs without gradients.
        if any(tensor.requires_grad and (enabled or not tensor.is_leaf) for tensor in tensors):
            for tensor, kind in zip(tensors, kinds):
                if kind == MADE and not (name in _FACTORS and tensor.numel() == 1):
                    self._note(tensor_digest(tensor))
            if name in _SHIFTS:
                for number in arguments:
                    if type(number) in (int, float):
                        self._note(repr(float(number)))

    def _note(self, digest: str) -> None:
        if digest and digest not in self.noted and len(self.noted) < MOST_NOTED:
            frames = self._journal.user_code.frames_here(sys._getframe(2))
            self.noted[digest] = (frames[0][0], frames[0][1]) if frames else ("", 0)

    def _kind(self, tensor: Any) -> int:
        marked = self._marked(tensor)
        if marked is not None:
            return marked
        is_parameter = isinstance(tensor, self._torch.nn.Parameter)
        return COMPUTED if is_parameter or (tensor.requires_grad and not tensor.is_leaf) else MADE

    def _marked(self, tensor: Any) -> int | None:
        try:
            found = self._marks.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # What is sparse has no storage.
            return None
        return None if found is None else found[1]

    def _set(self, tensor: Any, kind: int) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        held = self._marks.get(storage._cdata)
        self._marks[storage._cdata] = (held[0] if held else self._weakly(storage), kind)
        if len(self._marks) > _MOST_MARKS:
            self._marks = {at: one for at, one in self._marks.items() if not one[0].expired()}

    def _tensors(self, value: Any) -> Iterator[Any]:
        if isinstance(value, self._torch.Tensor):
            yield value
        elif isinstance(value, dict):
            for part in value.values():
                yield from self._tensors(part)
        elif isinstance(value, (list, tuple)):
            for part in value:
                yield from self._tensors(part)


LENGTHS_FILE = "lengths.json"
"""Of the loaders of rank 0, by their ordinals."""
LOOK_EVERY_S = 0.02
MOST_DIGESTS = 4
MOST_BYTES = 1 << 28
"""Of the samples that a rank keeps; larger ones are not compared."""
OWN = "own"
"""In place of ranks: each process of another launch gets the samples of the rank with its number."""
Place = tuple[int, int]
"""The n-th iterator that fetched anything, and the n-th of its batches."""


class CannotJoin(Exception):
    """Batches that one process cannot be given together; the text says why."""


class _Bounded(io.BytesIO):
    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self._most:
            raise CannotJoin(f"the samples of a rank take more than {MOST_BYTES >> 20} MB")
        return super().write(data)


def whose(spec: dict[str, Any], journal: Journal) -> list[int]:
    """Return the ranks whose samples this process gets, in that order; empty where it keeps its own."""
    ranks: Any = spec.get("ranks", [])
    return [journal.rank or 0] if ranks == OWN else list(ranks)


class OfRanks:
    """What the ranks have left for this process; where it has begun beside them, it waits where it first needs any."""

    def __init__(self, journal: Journal, spec: dict[str, Any]) -> None:
        self._directory = os.path.join(journal.run_directory, str(spec["from"])) if spec.get("ranks") else ""
        self._ranks = whose(spec, journal)

    def entries(self, name: str) -> list[Any]:
        """Return everything that was pickled to a file one after the other; nothing where there is none."""
        found: list[Any] = []
        try:
            with open(os.path.join(self._awaited(), name), "rb") as file:
                while True:
                    found.append(pickle.load(file))
        except (EOFError, FileNotFoundError):
            return found

    def of_each(self, kind: str) -> list[list[Any]]:
        """Return the same of each rank that this process stands for."""
        return [self.entries(f"{kind}-{rank}.pickle") for rank in self._ranks]

    def document(self, name: str) -> dict[str, Any]:
        """Return what a file of JSON holds; nothing where there is none."""
        try:
            with open(os.path.join(self._awaited(), name), encoding="utf-8") as file:
                return dict(json.load(file))
        except FileNotFoundError:
            return {}

    def _awaited(self) -> str:
        while not os.path.isdir(self._directory):
            time.sleep(LOOK_EVERY_S)
        return self._directory


class Feeding:
    """Replacement of what the loaders of this process fetch, or the record of it."""

    def __init__(self, journal: Journal, torch: Any, spec: dict[str, Any], of_ranks: OfRanks, directory: str) -> None:
        self._journal = journal
        self._torch = torch
        self._of_ranks = of_ranks
        self._directory = directory
        self._iterators = 0
        self._kept: Optional[BinaryIO] = None
        self._bytes = 0
        self._spec = spec
        self._in_turn = spec.get("feed") == "in-turn"
        """Batch after batch of one rank after the other, in place of one batch of all."""
        self.drawn: list[str] = []
        """Digests of the first samples that the loaders of this process made."""
        self.sizes: list[int] = []
        """Samples of each rank in the newest batch, where it was joined."""
        self.fetches = False
        """Samples are made and collated right now."""
        self.batch = 0
        """Number of the newest, the same in all processes; 0 before the first."""
        self.on_fetch: Callable[[], object] = lambda: None
        self.on_batch: Callable[[Any], object] = lambda batch: None
        self.stop: Callable[[str], object] = lambda why: None
        self.unseen: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        """In it operators are not looked at; to take 1,024 samples of two tensors apart took 0.6 s while they were."""

    def install(self) -> None:
        """Patch the fetchers, under whatever else was put around them."""
        fetchers = self._torch.utils.data._utils.fetch
        for fetcher_class in (fetchers._MapDatasetFetcher, fetchers._IterableDatasetFetcher):
            fetcher_class.fetch = self._around(fetcher_class.fetch)

    @functools.cached_property
    def _fed(self) -> list[dict[Place, Any]]:
        return [{entry[0]: entry[1:] for entry in entries} for entries in self._of_ranks.of_each("samples")]

    @property
    def has_batches(self) -> bool:
        """Whether the ranks drew from loaders."""
        return any(self._fed)

    def _around(self, fetch: Any) -> Any:
        feeding = self

        @functools.wraps(fetch)
        def fetch_in_place(fetcher: Any, index: Any) -> Any:
            if os.getpid() != feeding._journal.pid:
                return fetch(fetcher, index)
            feeding.on_fetch()
            place, collate = feeding._place(fetcher), fetcher.collate_fn
            fetcher.collate_fn = functools.partial(feeding._collated, place, fetcher.auto_collation, collate)
            feeding.fetches = True
            try:
                with feeding.unseen():
                    batch = fetch(fetcher, index)
                feeding.on_batch(batch)
                return batch
            finally:
                feeding.fetches = False
                fetcher.collate_fn = collate
                feeding.batch = 1 + 1000 * place[0] + place[1]
                seed(feeding._torch, feeding.batch, feeding._journal.rank or 0)

        return fetch_in_place

    def _place(self, fetcher: Any) -> Place:
        iterator, count = fetcher.__dict__.get("_ddpdoctor_place", (None, 0))
        if iterator is None:
            iterator, self._iterators = self._iterators, self._iterators + 1
        fetcher._ddpdoctor_place = iterator, count + 1
        return iterator, count

    def _collated(self, place: Place, collates: bool, collate: Any, samples: Any) -> Any:
        if len(self.drawn) < MOST_DIGESTS:
            self.drawn += self._journal.guarded(leaves, samples, self._torch, harms=()) or []
        if not self._spec.get("ranks"):
            return self._keep(place, collates, collate, samples)
        if not any(self._fed):
            return collate(samples)
        try:
            return self._joined(place, collates, collate)
        except CannotJoin as problem:
            self.stop(str(problem))
            return collate(samples)

    def _keep(self, place: Place, collates: bool, collate: Any, samples: Any) -> Any:
        content = self._pickled(samples)
        before = states(self._torch)
        batch = collate(samples)
        if states(self._torch) != before and isinstance(content, bytes):
            content, collates = self._pickled(batch), False
        entry = pickle.dumps((place, collates, content))
        self._bytes += len(entry)
        if self._kept is None:
            path = os.path.join(self._directory, f"samples-{self._journal.rank}.pickle")
            self._kept = open(path, "wb")  # noqa: SIM115
        self._kept.write(entry)
        self._kept.flush()
        return batch

    def _pickled(self, content: Any) -> bytes | str:
        """Return samples as they are now, or why they cannot be kept; of a tensor that looks at a part of a larger one,
        as those of a TensorDataset do, only that part.
        """
        torch = self._torch

        class Parts(pickle.Pickler):
            def reducer_override(self, one: Any) -> Any:
                if type(one) is not torch.Tensor or one.layout is not torch.strided:
                    return NotImplemented
                size = one.numel() * one.element_size()
                whole = one.clone() if one.untyped_storage().nbytes() > size else one
                if not whole.is_contiguous() or whole.device.type != "cpu" or whole.requires_grad or whole.is_quantized:
                    return whole.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
                whole = whole.resolve_conj().resolve_neg()
                return _tensor, (ctypes.string_at(whole.data_ptr(), size), whole.dtype, tuple(whole.shape))

        held = _Bounded(MOST_BYTES - self._bytes)
        try:
            Parts(held, pickle.HIGHEST_PROTOCOL).dump(content)
        except CannotJoin as problem:
            return str(problem)
        except Exception as error:
            return f"a sample cannot be pickled: {error}"
        return held.getvalue()

    def _joined(self, place: Place, collates: bool, collate: Any) -> Any:
        iterator, number = place
        if self._in_turn:
            which, place = number % len(self._fed), (iterator, number // len(self._fed))
            parts: list[Any] = [self._fed[which].get(place)]
        else:
            parts = [fed.get(place) for fed in self._fed]
        if all(part is None for part in parts):
            raise CannotJoin("exhausted")
        if any(part is None for part in parts):
            raise CannotJoin("the ranks drew different numbers of batches")
        for part in parts:
            if isinstance(part[1], str):
                raise CannotJoin(part[1])
        contents = [pickle.loads(part[1]) for part in parts]
        if all(part[0] for part in parts) and all(isinstance(one, list) for one in contents) and collates:
            self.sizes = [len(content) for content in contents]
            return collate([sample for content in contents for sample in content])
        self.sizes = [_length(content, self._torch) for content in contents]
        return joined(contents, self._torch)


def _tensor(data: bytes, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Return a tensor of these bytes; torch's own way reads a file for each, 2,048 of them in 0.5 s."""
    torch = sys.modules["torch"]
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


def joined(parts: Sequence[Any], torch: Any) -> Any:
    """Join the same structure of several ranks, tensors along their first dimension; raises CannotJoin."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(type(part) is not type(first) for part in parts):
        raise CannotJoin("the ranks' batches are of different types")
    if isinstance(first, torch.Tensor):
        if first.dim() == 0 or any(part.shape[1:] != first.shape[1:] for part in parts):
            raise CannotJoin("the ranks' batches have different shapes, and are collated with random numbers")
        return torch.cat(list(parts))
    if isinstance(first, dict):
        if any(part.keys() != first.keys() for part in parts):
            raise CannotJoin("the ranks' batches have different keys")
        made = {key: joined([part[key] for part in parts], torch) for key in first}
        return made if type(first) is dict else type(first)(made)
    if isinstance(first, (list, tuple)):
        texts = [value for part in parts for value in part]
        if all(isinstance(value, str) for value in texts):
            return type(first)(texts)
        if any(len(part) != len(first) for part in parts):
            raise CannotJoin("the ranks' batches have different lengths")
        values = [joined([part[number] for part in parts], torch) for number in range(len(first))]
        return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)
    if all(part == first for part in parts):
        return first
    raise CannotJoin(f"batches with a {type(first).__name__} cannot be joined")


def _length(value: Any, torch: Any) -> int:
    if isinstance(value, torch.Tensor):
        return int(value.shape[0]) if value.dim() else 1
    if isinstance(value, dict):
        value = list(value.values())
    return _length(value[0], torch) if isinstance(value, (list, tuple)) and value else 1


def seed(torch: Any, number: int, rank: int = 0) -> None:
    """Seed the generators: torch's by rank, for samples are to differ, the others alike in all processes, since what
    they draw, a factor or a choice, cannot be handed to one process.
    """
    torch.default_generator.manual_seed(1_000_003 * rank + number)
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        numpy.random.seed(number)


def states(torch: Any) -> tuple[Any, ...]:
    """Return the states of the generators: torch's, Python's and NumPy's."""
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None and hasattr(numpy, "random") else ()
    of_numpy = tuple(getattr(part, "tobytes", lambda part=part: part)() for part in drawn)
    return bytes(torch.default_generator.get_state().tolist()), random.getstate(), of_numpy


# The random numbers that a training step draws from torch, kept by the ranks and put together in one process.

MOST_DRAWN_BYTES = 1 << 26
LOSSES_NOTED = 64
_LOADER_FILES = ("torch/utils/data/dataloader.py", "torch/utils/data/sampler.py")
_LOSSES = {"aten::nll_loss_forward": 2, "aten::nll_loss2d_forward": 2, "aten::binary_cross_entropy_with_logits": 3}
"""Losses that take weights of classes, behind each function and module of torch's that does, and the argument."""
_REDUCED_ELEMENTS = 64
"""A reduced tensor that holds a count has no more."""
_SCALINGS = {"aten::mul": "mul", "aten::mul_": "mul", "aten::div": "div", "aten::div_": "div"}
_RESCALINGS = {
    f"aten::{name}" for kind in ("mul", "div") for name in (kind, f"{kind}_", f"_foreach_{kind}", f"_foreach_{kind}_")
}
"""Operators that multiply gradients, in place or not."""
Key = tuple[str, str, int, int]
"""Operator, file and line of the user's, and how often it was met there before."""


class Draws:
    """What random operators returned, and the losses with weights."""

    def __init__(
        self, journal: Journal, torch: Any, feeding: Feeding, spec: dict[str, Any], of_ranks: OfRanks, directory: str
    ) -> None:
        self._journal = journal
        self._torch = torch
        self._feeding = feeding
        self._of_ranks = of_ranks
        self._directory = directory
        self._spec = spec
        self._in_turn = spec.get("feed") == "in-turn"
        self._singles = 0, 0
        """The newest batch, and how many single numbers were drawn since."""
        self.entering = Entering(journal, torch)
        self._met: dict[tuple[str, str, int], int] = {}
        self._kept: Optional[BinaryIO] = None
        self._bytes = 0
        self.active = False
        self.losses: list[list[Any]] = []
        """Since the last step: line, digest of the weights, and how many targets count."""
        self.scalings: dict[tuple[str, str, int], float] = {}
        """The numbers by which losses are multiplied or divided: operation, file and line of the user's, …"""
        self.scaled_back: dict[tuple[str, float], None] = {}
        """… and by which backward multiplies or divides: what is there, too, is no loss for a log."""
        self.counted: dict[tuple[str, str, int], tuple[str, int]] = {}
        """Where a number of a scaling was all-reduced."""
        self._reduced: list[tuple[Any, tuple[str, int]]] = []
        """The newest small tensors that were all-reduced, which get their sums after the call."""
        self.is_gradient: Callable[[Any], bool] = lambda tensor: False
        self.rescaled: dict[tuple[str, int], None] = {}
        """Lines of the user's that multiply gradients between a backward and a step."""
        self.unmatched = 0
        """Draws of one process that no rank made in that way."""

    def install(self) -> None:
        """See every operator of this thread from now on."""
        from torch.utils._python_dispatch import (
            TorchDispatchMode,
            _get_current_dispatch_mode,
            _pop_mode_temporarily,
        )

        draws, torch, tag = self, self._torch, self._torch.Tag.nondeterministic_seeded
        self._feeding.on_batch = functools.partial(self.entering.mark, kind=GIVEN)

        class Seen(TorchDispatchMode):  # type: ignore[misc]
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = function(*args, **(kwargs or {}))
                if draws.active and not draws._feeding.fetches:
                    name = function._schema.name
                    if tag in function.tags:
                        single = isinstance(result, torch.Tensor) and result.numel() == 1 and draws._feeding.batch
                        if single and not (kwargs or {}).get("generator"):
                            drawn = draws._journal.guarded(draws._alike, function, args, kwargs or {}, harms=())
                        else:
                            drawn = draws._journal.guarded(draws._drawn_by, name, result, harms=())
                        result = result if drawn is None else drawn
                    draws._journal.guarded(draws.entering.see, name, args, kwargs, result, harms=())
                    if name in _LOSSES:
                        draws._journal.guarded(draws._note_loss, name, args, harms=())
                    if name in _SCALINGS and isinstance(result, torch.Tensor):
                        draws._journal.guarded(draws._note_scaling, _SCALINGS[name], args, result, harms=())
                    if name in _RESCALINGS:
                        draws._journal.guarded(draws._note_rescaling, args, harms=())
                    if name == "c10d::allreduce_":
                        draws._journal.guarded(draws._note_reduced, args, harms=())
                return result

        seen = Seen()
        seen.__enter__()

        def unseen() -> contextlib.AbstractContextManager[object]:
            is_newest = _get_current_dispatch_mode() is seen
            return _pop_mode_temporarily() if is_newest else contextlib.nullcontext()

        self._feeding.unseen = unseen

    @functools.cached_property
    def _drawn(self) -> list[dict[Key, Any]]:
        return [dict(entries) for entries in self._of_ranks.of_each("draws")]

    def _alike(self, function: Any, arguments: Any, options: Any) -> Any:
        """Draw a single number, as of a choice, so that it is the same in all processes."""
        generator = self._torch.default_generator
        state = generator.get_state()
        batch, drawn = self._singles
        self._singles = (batch, drawn + 1) if batch == self._feeding.batch else (self._feeding.batch, 0)
        generator.manual_seed(7919 * self._singles[0] + self._singles[1])
        try:
            return function(*arguments, **options)
        finally:
            generator.set_state(state)

    def _drawn_by(self, name: str, result: Any) -> Any:
        if os.getpid() != self._journal.pid or not isinstance(result, self._torch.Tensor) or self._is_of_loader():
            return result
        file, line = self._line()
        count = self._met.get((name, file, line), 0)
        self._met[name, file, line] = count + 1
        key = (name, os.path.basename(file), line, count)
        if not self._spec.get("ranks"):
            self._keep(key, result)
            return result
        parts = [drawn.get(key) for drawn in self._drawn]
        if self._in_turn:
            which = self._drawn[count % len(self._drawn)]
            parts = [which.get((*key[:3], count // len(self._drawn)))]
        value = None if any(part is None for part in parts) else self._together(name, result, parts)
        if value is None:
            self.unmatched += 1
            return result
        value = value.to(dtype=result.dtype, device=result.device)
        return result.copy_(value) if value.shape == result.shape else value

    def _is_of_loader(self) -> bool:
        """Return whether torch's loader draws: the seed of its workers or of an order. One process is given batches."""
        for frame in outwards(sys._getframe(2)):
            file = frame.f_code.co_filename
            if file.endswith(_LOADER_FILES):
                return True
            if self._journal.user_code.holds(file):
                return False
        return False

    def _together(self, name: str, result: Any, parts: list[Any]) -> Any:
        """Return what the ranks drew, as one draw; None where that makes no sense."""
        torch, first = self._torch, parts[0]
        shape = tuple(result.shape)
        alike = all(part.shape == first.shape for part in parts)
        if alike and tuple(first.shape) == shape:
            if all(torch.equal(part, first) for part in parts):
                return first
            # Without a loader a script asks for the batch of a rank, whoever runs it.
            own_batches = not self._feeding.has_batches and first.dim() > 0 and first.shape[0] > 1
            return torch.cat(parts) if own_batches and not name.endswith("_") else None
        if any(part.dim() != result.dim() for part in parts):
            return None
        for dimension in range(result.dim()):
            others = shape[:dimension] + shape[dimension + 1 :]
            if (
                all(tuple(p.shape[:dimension] + p.shape[dimension + 1 :]) == others for p in parts)
                and sum(part.shape[dimension] for part in parts) == shape[dimension]
            ):
                if name == "aten::randperm":
                    ends = [sum(len(part) for part in parts[:number]) for number in range(len(parts))]
                    parts = [part + end for part, end in zip(parts, ends)]
                return torch.cat(parts, dimension)
        return None

    def _keep(self, key: Key, result: Any) -> None:
        self._bytes += result.numel() * result.element_size()
        if self._bytes > MOST_DRAWN_BYTES:
            return
        if self._kept is None:
            self._kept = open(os.path.join(self._directory, f"draws-{self._journal.rank}.pickle"), "wb")  # noqa: SIM115
        pickle.dump((key, result.detach().cpu().clone()), self._kept)
        self._kept.flush()

    def _note_loss(self, name: str, arguments: Any) -> None:
        if len(self.losses) >= LOSSES_NOTED:
            return
        file, line = self._line()
        weights = arguments[_LOSSES[name]] if len(arguments) > _LOSSES[name] else None
        digest = tensor_digest(weights) if isinstance(weights, self._torch.Tensor) else ""
        counted = None
        if "nll" in name:
            counted = int((arguments[1] != arguments[4]).sum())
        self.losses.append([file, line, digest, counted])

    def _note_scaling(self, name: str, arguments: Any, result: Any) -> None:
        loss, number = arguments[:2]
        if isinstance(number, self._torch.Tensor) and not number.dim() and not number.requires_grad:
            number = number.item()  # A loss of each token may be divided by a count, too.
        elif result.dim():
            return
        if type(number) not in (int, float):
            return
        in_backward = getattr(self._torch._C, "_current_graph_task_id", lambda: -1)() != -1
        if in_backward and len(self.scaled_back) < LOSSES_NOTED:
            self.scaled_back[name, float(number)] = None
        elif not in_backward and loss.requires_grad and len(self.scalings) < LOSSES_NOTED:
            place = (name, *self._line())
            self.scalings.setdefault(place, float(number))
            sums = number if name == "div" or not number else 1 / number
            found = [where for one, where in self._reduced if ((one - sums).abs() <= 1e-6 * abs(sums)).any()]
            if found:
                self.counted.setdefault(place, found[-1])

    def _note_rescaling(self, arguments: Any) -> None:
        several = arguments[0] if isinstance(arguments[0], (list, tuple)) else arguments[:1]
        place = self._line()
        if place in self.rescaled or self._torch._C._current_graph_task_id() != -1:
            return
        if several and self.is_gradient(several[0]) and len(self.rescaled) < LOSSES_NOTED:
            self.rescaled[place] = None

    def _note_reduced(self, arguments: Any) -> None:
        if self._torch._C._current_graph_task_id() == -1:
            small = [(one, self._line()) for one in arguments[0] if one.numel() <= _REDUCED_ELEMENTS]
            self._reduced = [*self._reduced, *small][-_REDUCED_ELEMENTS:]

    def _line(self) -> tuple[str, int]:
        frames = self._journal.user_code.frames_here(sys._getframe(2))
        return (frames[0][0], frames[0][1]) if frames else ("", 0)
