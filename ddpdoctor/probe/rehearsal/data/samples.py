"""A few samples, fetched under a fixed seed, so that the ranks' data can be compared sample by sample.

It happens right after the first batch, in the process that fetches (a worker's or the rank's own), with every random
state put back as it was.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import os
import random
import sys
import time
from array import array
from collections.abc import Callable
from types import FrameType
from typing import Any, Optional

from ...journal import Journal
from ...observed import WHOLE_UP_TO_BYTES, base_indices, base_of, digest_of, leaves, tensor_digest
from ...torch_compat import on_call

# Which random numbers a rank will draw for its data: what seeds them, and the generators' states at a fetch.

SEEDINGS_NOTED = 50


class Randomness:
    """Patches of the functions that seed, and the generators' states on request."""

    def __init__(self, journal: Journal, torch: Any) -> None:
        self._journal = journal
        self._torch = torch
        self._seedings: dict[str, int] = {}
        self._before: Optional[tuple[dict[str, str], dict[str, int]]] = None

    def install(self) -> None:
        """Replace ``torch.manual_seed``, ``random.seed`` and ``numpy.random.seed``."""
        self._hook("torch", "manual_seed", self._torch, self._torch.random)
        self._hook("random", "seed", random)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            self._hook("numpy", "seed", numpy.random)

    def fetch_begins(self) -> None:
        """Read the states before the first batch of a data set is fetched."""
        self._before = self._journal.guarded(self._read_states, harms=("random_states",))

    def fetch_ended(self, dataset: Any, length: int) -> None:
        """Write the states that the fetch began with, and which of them it moved."""
        if self._before is not None:
            self._journal.guarded(self._note_states, dataset, length, *self._before, harms=("random_states",))

    def _read_states(self) -> tuple[dict[str, str], dict[str, int]]:
        """Return the digest of each library's generator in this process, and how often each was seeded."""
        states = {
            "torch": tensor_digest(self._torch.default_generator.get_state()),
            "random": digest_of(repr(random.getstate()).encode()),
        }
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state = numpy.random.get_state()
            parts = state if isinstance(state, tuple) else (repr(state),)
            states["numpy"] = digest_of(b"".join(getattr(part, "tobytes", repr(part).encode)() for part in parts))
        return states, dict(self._seedings)

    def _hook(self, library: str, name: str, *modules: Any) -> None:
        seed, journal, randomness = getattr(modules[0], name), self._journal, self

        @functools.wraps(seed)
        def seed_noted(*arguments: Any, **options: Any) -> Any:
            randomness._seedings[library] = randomness._seedings.get(library, 0) + 1
            if journal.may_be_rank and sys._getframe(1).f_globals.get("__package__") != __package__:
                given = next(iter((*arguments, *options.values())), None)
                journal.guarded(randomness._note_seeding, library, journal.here(), given, harms=("seedings",))
            return seed(*arguments, **options)

        # By these names pickle finds it again.
        seed_noted.__module__, seed_noted.__qualname__ = modules[-1].__name__, name
        for module in modules:
            setattr(module, name, seed_noted)

    def _note_seeding(self, library: str, site: int, given: Any) -> None:
        if site >= 0 and self._seedings[library] <= SEEDINGS_NOTED:
            value = given if isinstance(given, int) and abs(given) < 1 << 63 else None
            self._journal.event("seeding", library=library, site=site, value=value)

    def _note_states(self, dataset: Any, length: int, states: dict[str, str], seedings: dict[str, int]) -> None:
        (after, _), worker = self._read_states(), self._torch.utils.data.get_worker_info()
        place = self._place(dataset)
        for library, digest in states.items():
            seeded = self._seedings.get(library, 0) != seedings.get(library, 0)
            self._journal.event(
                "random_state",
                library=library,
                dataset_type=type(dataset).__qualname__,
                dataset_length=length,
                worker=-1 if worker is None else worker.id,
                digest=digest,
                drawn_from=after[library] != digest and not seeded,
                **(place or {}),
            )

    def _place(self, dataset: Any) -> Optional[dict[str, Any]]:
        """Return the lines of the innermost data set's ``__getitem__``, when the user wrote it."""
        code = getattr(getattr(type(base_of(dataset, self._torch)), "__getitem__", None), "__code__", None)
        if code is None or not self._journal.user_code.holds(code.co_filename):
            return None
        lines = [line for _, line in dis.findlinestarts(code) if line]
        return {
            "file": os.path.abspath(code.co_filename),
            "line": code.co_firstlineno,
            "end_line": max(lines, default=code.co_firstlineno),
        }


SEED = 20_011
MOST_S = 1.0


class Samples:
    """The fetch of map-style data sets, replaced once per data set and process."""

    def __init__(self, journal: Journal, torch: Any, randomness: Randomness, division: Division) -> None:
        self._journal = journal
        self._torch = torch
        self._randomness = randomness
        self._division = division
        self._probed: set[int] = set()

    def install(self) -> None:
        """Patch the fetcher that main process and workers share."""
        fetcher_class = self._torch.utils.data._utils.fetch._MapDatasetFetcher
        fetch, randomness = fetcher_class.fetch, self._randomness

        @functools.wraps(fetch)
        def fetch_and_probe(fetcher: Any, index: Any) -> Any:
            dataset = fetcher.dataset
            if id(dataset) in self._probed or not _is_number(index):
                return fetch(fetcher, index)
            self._probed.add(id(dataset))
            length = _length(dataset)
            if length is None:
                return fetch(fetcher, index)
            randomness.fetch_begins()
            batch = fetch(fetcher, index)
            randomness.fetch_ended(dataset, length)
            self._journal.guarded(self._probe, dataset, length, harms=("loaders",))
            self._journal.guarded(self._division.note_holdings, base_of(dataset, self._torch), harms=("holdings",))
            return batch

        fetcher_class.fetch = fetch_and_probe

    def leave_out(self, dataset: Any) -> None:
        """Probe no fetch of a data set in this process: its workers do, with the random states of the job."""
        self._probed.add(id(dataset))

    def _probe(self, dataset: Any, length: int) -> None:
        started = time.monotonic()
        states = self._states(dataset)
        try:
            for source, index in self._places(dataset, length):
                sample = self._fetch(source, index)
                if sample is None:
                    return
                self._journal.event(
                    "sample",
                    dataset_type=type(dataset).__qualname__,
                    dataset_length=length,
                    index=base_indices(source, array("q", [index]), self._torch)[0],
                    leaves=leaves(sample, self._torch),
                )
                if time.monotonic() - started > MOST_S:
                    return
        finally:
            for put_back, state in states:
                put_back(state)

    def _places(self, dataset: Any, length: int) -> list[tuple[Any, int]]:
        """Return what to fetch; of a subset's base a few samples as well, which ranks with other subsets have too.

        The first two are what data sets of different lengths have in common.
        """
        own = [(dataset, index) for index in sorted({0, 1, length // 2, length - 1}) if index < length]
        base = base_of(dataset, self._torch)
        if base is dataset:
            return own
        last = (_length(base) or 1) - 1
        return [*own[:2], *((base, index) for index in sorted({0, last // 2, last})), *own[2:]]

    def _fetch(self, dataset: Any, index: int) -> Any:
        """Return one sample under the seed; None when the data set does not take the index, which is no fault of it."""
        self._torch.default_generator.manual_seed(SEED)
        random.seed(SEED)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(SEED)
        try:
            return dataset[index]
        except Exception:
            return None

    def _states(self, dataset: Any) -> list[tuple[Callable[[Any], Any], Any]]:
        """Return how to put back every random state that a fetch may move, the data set's own generators included."""
        generator = self._torch.default_generator
        states: list[tuple[Callable[[Any], Any], Any]] = [
            (generator.set_state, generator.get_state()),
            (random.setstate, random.getstate()),
        ]
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            states.append((numpy.random.set_state, numpy.random.get_state()))
        with_states = (self._torch.Generator, numpy.random.RandomState) if numpy else (self._torch.Generator,)
        for value in list(vars(dataset).values()) if hasattr(dataset, "__dict__") else ():
            if isinstance(value, random.Random):
                states.append((value.setstate, value.getstate()))
            elif isinstance(value, with_states):
                states.append((value.set_state, value.get_state()))
            elif numpy is not None and isinstance(value, numpy.random.Generator):
                states.append((functools.partial(setattr, value.bit_generator, "state"), value.bit_generator.state))
        return states


def _length(dataset: Any) -> Optional[int]:
    """Return the number of samples of a data set; None when it has no length."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _is_number(index: Any) -> bool:
    """Return whether the sampler draws plain numbers; other keys cannot be made up."""
    first = index[0] if isinstance(index, (list, tuple)) and index else index
    return isinstance(first, int)


# How the data is divided: subsets, the ranks given to samplers, and the order of what data sets hold.

MOST_INDICES = 2_000_000
MOST_ROWS = 200_000
MOST_TAUGHT_S = 0.5
ATTRIBUTES_NOTED = 8
_SITE, _PART, TOLD_EPOCH = "_ddpdoctor_site", "_ddpdoctor_part", "_ddpdoctor_told_epoch"


def _note_epoch(frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    object.__setattr__(arguments[0], TOLD_EPOCH, True)


class Division:
    """Listeners at the constructors of ``Subset`` and ``DistributedSampler``, and at the latter's ``set_epoch``."""

    def __init__(self, journal: Journal, torch: Any) -> None:
        self._journal = journal
        self._torch = torch
        self._parts = 0

    def install(self) -> None:
        """Listen to the classes; subclasses that call the constructor follow."""
        journal, data = self._journal, self._torch.utils.data
        on_call(journal, data.Subset, "__init__", after=self._note_part, harms=("parts",))
        sampler = data.distributed.DistributedSampler
        on_call(journal, sampler, "__init__", after=self._note_sampler, harms=("parts",))
        on_call(journal, sampler, "set_epoch", after=_note_epoch, harms=("passes",))

    def _note_sampler(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self._journal.may_be_rank:
            object.__setattr__(arguments[0], _SITE, self._journal.site(frame))

    def _note_part(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if not self._journal.may_be_rank:
            return
        subset, site = arguments[0], self._journal.site(frame)
        number, self._parts = self._parts, self._parts + 1
        object.__setattr__(subset, _PART, number)
        try:
            if len(subset.indices) > MOST_INDICES:
                return
            indices = base_indices(subset, array("q", range(len(subset.indices))), self._torch)
            dataset = base_of(subset, self._torch)
            length = len(dataset)
        except (TypeError, ValueError, NotImplementedError):
            return  # its keys are no numbers, or it has no length: nothing to compare
        self._journal.event(
            "part",
            part=number,
            site=site,
            base_type=type(dataset).__qualname__,
            base_length=length,
            count=len(indices),
            index_sum=sum(indices),
            digest=digest_of(array("q", sorted(indices)).tobytes()),
        )

    def note_holdings(self, dataset: Any) -> None:
        """Write digests of what a data set holds for each of its samples, in their order and in any order."""
        if not hasattr(dataset, "__dict__"):
            return
        try:
            started, length = time.monotonic(), len(dataset)
        except (TypeError, NotImplementedError):
            return
        for name, value in list(vars(dataset).items())[:ATTRIBUTES_NOTED]:
            digests = _row_digests(value, length, started + MOST_TAUGHT_S, self._torch)
            if digests is not None:
                self._journal.event(
                    "holding",
                    dataset_type=type(dataset).__qualname__,
                    dataset_length=length,
                    attribute=name,
                    ordered_digest=digests[0],
                    unordered_digest=digests[1],
                )


def described(sampler: Any, dataset: Any) -> dict[str, Any]:
    """Return where a loader's sharding sampler was made, and which noted subset the data set is."""
    return {"sampler_site": getattr(sampler, _SITE, -1), "part": getattr(dataset, _PART, -1)}


def _row_digests(rows: Any, length: int, deadline_s: float, torch: Any) -> Optional[tuple[str, str]]:
    """Return digests of rows with and without their order; None when it is no plain list of one row a sample."""
    # Containers of other kinds may look rows up by a label, or open a file.
    if not 1 < length <= MOST_ROWS or type(rows).__name__ not in ("list", "tuple", "ndarray", "Tensor"):
        return None
    if getattr(rows, "is_cuda", False) or getattr(rows, "ndim", 1) == 0 or len(rows) != length:
        return None
    ordered, total = hashlib.blake2b(digest_size=8), 0
    for number in range(length):
        content = _content(rows[number], torch)
        if content is None or (number % 256 == 0 and time.monotonic() > deadline_s):
            return None
        digest = hashlib.blake2b(content, digest_size=8).digest()
        ordered.update(digest)
        total += int.from_bytes(digest, "big")
    return ordered.hexdigest(), f"{total & (1 << 64) - 1:016x}"


def _content(row: Any, torch: Any) -> Optional[bytes]:
    if isinstance(row, torch.Tensor):
        return tensor_digest(row, WHOLE_UP_TO_BYTES).encode() or None
    if isinstance(row, (str, bytes, int, float)):
        return repr(row).encode()
    if isinstance(row, (tuple, list)) and len(row) <= 8:
        parts = [_content(item, torch) for item in row]
        return None if None in parts else b"\0".join(part for part in parts if part is not None)
    return row.tobytes() if hasattr(row, "tobytes") else None
