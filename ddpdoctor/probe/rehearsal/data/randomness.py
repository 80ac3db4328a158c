"""Which random numbers a rank will draw for its data: what seeds them, and the generators' states at a fetch.

States are read, never drawn from.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import os
import random
import sys
from typing import Any, Optional

from ...facts.digests import tensor_digest
from ...journal import Journal

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
            "random": _digest(repr(random.getstate()).encode()),
        }
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state = numpy.random.get_state()
            parts = state if isinstance(state, tuple) else (repr(state),)
            states["numpy"] = _digest(b"".join(getattr(part, "tobytes", repr(part).encode)() for part in parts))
        return states, dict(self._seedings)

    def _hook(self, library: str, name: str, *modules: Any) -> None:
        seed, journal, randomness = getattr(modules[0], name), self._journal, self

        @functools.wraps(seed)
        def seed_noted(*arguments: Any, **options: Any) -> Any:
            randomness._seedings[library] = randomness._seedings.get(library, 0) + 1
            if journal.may_be_rank and sys._getframe(1).f_globals.get("__package__") != __package__:
                journal.guarded(randomness._note_seeding, library, journal.here(), harms=("seedings",))
            return seed(*arguments, **options)

        # By these names pickle finds it again.
        seed_noted.__module__, seed_noted.__qualname__ = modules[-1].__name__, name
        for module in modules:
            setattr(module, name, seed_noted)

    def _note_seeding(self, library: str, site: int) -> None:
        if site >= 0 and self._seedings[library] <= SEEDINGS_NOTED:
            self._journal.event("seeding", library=library, site=site)

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
        while isinstance(dataset, self._torch.utils.data.Subset):
            dataset = dataset.dataset
        code = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
        if code is None or not self._journal.user_code.holds(code.co_filename):
            return None
        lines = [line for _, line in dis.findlinestarts(code) if line]
        return {
            "file": os.path.abspath(code.co_filename),
            "line": code.co_firstlineno,
            "end_line": max(lines, default=code.co_firstlineno),
        }


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
