"""What torch's flight recorder holds, written down when a standstill is suspected or a reader requests it.

Each dump adds what is new since the one before. An entry's number in its group is torch's own, less one.
"""

from __future__ import annotations

import importlib
import io
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, NoReturn

from ...record.writer import from_system
from .. import user_code
from ..groups import GroupBook
from ..journal import Journal
from ..torch_compat import Capabilities
from ..user_code import origin_of

# What an entry of torch's flight recorder means: the names of kinds and dtypes.

KINDS = {
    "_all_gather_base": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
    "allreduce_coalesced": "all_reduce",
}
"""Names in the recorder, as users spell them."""
DTYPES = {
    "Float": ("float32", 4),
    "Double": ("float64", 8),
    "Half": ("float16", 2),
    "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8),
    "Int": ("int32", 4),
    "Short": ("int16", 2),
    "Char": ("int8", 1),
    "Byte": ("uint8", 1),
}
"""Names of types in it, as users spell them, and the bytes of an element."""


def described(kind: str, shapes: list[tuple[int, ...]], dtype: str, origin: str) -> dict[str, Any]:
    """Return the fields of a signature; ``dtype`` is torch's name of it."""
    name, element_bytes = DTYPES.get(dtype, (dtype.lower(), 1))
    return user_code.described(kind, shapes, name, sum(map(prod, shapes)) * element_bytes, origin)


# Keeps torch's flight recorder from importing torch's compiler in our thread.

_NAME = "_inductor"


@contextmanager
def without_compiler(torch: Any) -> Iterator[None]:
    """Make ``torch._inductor`` empty for this thread, unless it was imported before; for others it is as ever."""
    names = vars(torch)
    empty = _Empty(f"{torch.__name__}.{_NAME}", threading.get_ident())
    if names.setdefault(_NAME, empty) is not empty:
        yield
        return
    try:
        yield
    finally:
        # What was imported meanwhile has taken its place, and stays.
        if names.get(_NAME) is empty:
            del names[_NAME]


class _Empty:
    """A module that has nothing for one thread; for every other one it is the module of that name."""

    def __init__(self, name: str, thread: int) -> None:
        self.__dict__.update(_Empty__name=name, _Empty__thread=thread)

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self.__thread:
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(importlib.import_module(self.__name), name, value)


MOST_ENTRIES = 500
"""Of the newest entries, so many are taken when nothing is known yet, or when the recorder has overflowed."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a flight record")


class Flights:
    """The flight recorders of one process."""

    def __init__(self, torch: Any, journal: Journal, groups: GroupBook, capabilities: Capabilities) -> None:
        self._torch = torch
        self._journal = journal
        self._groups = groups
        self._recorders = capabilities.recorders
        self._states = capabilities.recorder_states
        self._known: list[int] = [-1] * len(self._recorders)
        """Number of the newest entry of each recorder that was written."""
        self._open: list[set[int]] = [set() for _ in self._recorders]
        """Entries that were written before they were complete."""
        self._earlier: list[int] = [-1] * len(self._recorders)
        """Number of the newest entry of each recorder that is of an earlier world."""

    def note_world(self) -> None:
        """Leave out what the recorders hold by now: torch reuses the names of groups in the next world.

        Their numbers separate the entries. Their times are the system's, and a clock that is set back would put
        those of this world before it; ranks that leave out different ones seem to call different collectives.
        """
        for number, recorder in enumerate(self._recorders):
            self._earlier[number] = max((int(entry["record_id"]) for entry in self._entries(recorder)), default=-1)

    def counts(self) -> tuple[int, int, int]:
        """Return the enqueued and completed collectives of the default group, and all under way; -1 when not known."""
        enqueued, completed, under_way = -1, -1, 0
        for state in self._states:
            groups = json.loads(state(includeCollectives=False)).get("pg_status") or {}
            for group, counts in groups.items():
                last, done = (int(counts[f"last_{name}_collective"]) for name in ("enqueued", "completed"))
                under_way += max(0, last - max(0, done))
                if group == "0" and last > enqueued:
                    enqueued, completed = last, max(0, done)
        return enqueued, completed, under_way if self._states else -1

    def dump(self) -> None:
        """Write what the recorders hold beyond the last dump."""
        for number, recorder in enumerate(self._recorders):
            self._take(number, self._entries(recorder, stacks=True))

    def _entries(self, recorder: Callable[..., bytes], *, stacks: bool = False) -> list[dict[str, Any]]:
        with without_compiler(self._torch):
            content = recorder(includeCollectives=True, includeStackTraces=stacks)
        return [dict(entry) for entry in _Unpickler(io.BytesIO(content)).load().get("entries") or ()]

    def _take(self, number: int, entries: list[dict[str, Any]]) -> None:
        entries.sort(key=lambda entry: int(entry["record_id"]))
        still_open = self._open[number]
        completed = [
            record for entry in entries if (record := int(entry["record_id"])) in still_open and _is_over(entry)
        ]
        fresh = [entry for entry in entries if int(entry["record_id"]) > self._known[number]]
        continues = bool(fresh) and int(fresh[0]["record_id"]) == self._known[number] + 1
        if fresh and not continues:
            fresh = fresh[-MOST_ENTRIES:]
        of_this_world = [entry for entry in fresh if int(entry["record_id"]) > self._earlier[number]]
        rows = [row for entry in of_this_world if (row := self._row(entry)) is not None]
        still_open.difference_update(completed)
        still_open.update(int(entry["record_id"]) for entry in fresh if not _is_over(entry))
        if fresh:
            self._known[number] = int(fresh[-1]["record_id"])
        self._journal.event("flight", recorder=number, continues=continues or not fresh, rows=rows, completed=completed)

    def _row(self, entry: dict[str, Any]) -> list[int] | None:
        """Return record number, group, sequence, signature, site, start in ns, and whether it is over."""
        group = self._groups.number_named(str(entry["process_group"][0]))
        if group is None:
            return None
        kind = str(entry["profiling_name"]).rpartition(":")[2].partition(" ")[0]
        kind = KINDS.get(kind, kind)
        frames = [
            (str(frame["filename"]), int(frame["line"]), str(frame["name"])) for frame in entry.get("frames") or ()
        ]
        shapes = [tuple(shape) for shape in entry["input_sizes"]]
        dtype = str(next(iter(entry["input_dtypes"]), ""))
        origin = origin_of((file, name) for file, _, name in frames)
        key = (kind, tuple(shapes), dtype, origin)
        signature = self._journal.signature(key, lambda: described(kind, shapes, dtype, origin))
        users = tuple(frame for frame in frames if self._journal.user_code.holds(frame[0]))[:16]
        site = self._journal.site_of(users) if users else -1
        sequence = int(entry["p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"]) - 1
        record, started_ns = int(entry["record_id"]), from_system(int(entry["time_created_ns"]))
        return [record, group, sequence, signature, site, started_ns, int(_is_over(entry))]


def _is_over(entry: dict[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"
