"""Which ranks load the state of optimizers, schedulers and gradient scalers, and what these hold at the first step."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from ...call_listeners import on_call
from ...facts.digests import tensor_digest
from ...journal import Journal
from .replicas import Replicas

LOADS_NOTED = 200
VALUES_DIGESTED = 512
BYTES_OF_A_TENSOR = 1 << 12


class TrainingState:
    """Objects with training state, counted in the order in which they are made, and what is loaded into them."""

    def __init__(self, journal: Journal, torch: Any, replicas: Replicas) -> None:
        self._journal = journal
        self._replicas = replicas
        self._torch = torch
        self._known: WeakKeyDictionary[Any, tuple[str, int]] = WeakKeyDictionary()
        self._made: dict[str, int] = {}
        self._kinds: dict[Any, str] = {}
        """What objects of a class are, and of those that derive from it."""
        self._loads = 0

    def install(self) -> None:
        """Listen to construction and loading of the base classes."""
        torch = self._torch
        schedulers = [
            class_
            for class_ in vars(torch.optim.lr_scheduler).values()
            if isinstance(class_, type) and hasattr(class_, "load_state_dict")
        ]
        scaler = getattr(getattr(torch, "amp", None), "GradScaler", None) or torch.cuda.amp.GradScaler
        self._kinds = {**dict.fromkeys(schedulers, "scheduler"), torch.optim.Optimizer: "optimizer", scaler: "scaler"}
        for class_ in self._kinds:
            for name, tell in (("__init__", self._count), ("load_state_dict", self._note_load)):
                if name in vars(class_):
                    on_call(self._journal, class_, name, after=tell, harms=("training_states",))

    def note_first_step(self) -> None:
        """Digest every state, before the first optimizer step: what was loaded or sent around is there by then."""
        for held, (kind, number) in list(self._known.items()):
            self._journal.event(
                "training_state",
                kind=kind,
                number=number,
                type=type(held).__qualname__,
                digest=self._digest(_optimizer_values(held) if kind == "optimizer" else vars(held).values()),
                wraps=self._wraps_of(held),
            )

    def _wraps_of(self, held: Any) -> list[int]:
        """Return the wraps of the parameters that it steers; empty when that is not known."""
        steered = held if isinstance(held, self._torch.optim.Optimizer) else getattr(held, "optimizer", None)
        return [] if steered is None else self._replicas.scope_of(steered)[0]

    def _digest(self, values: Iterable[Any]) -> str:
        """Return a digest of the numbers and tensors among some values; other objects are left out."""
        digest = hashlib.blake2b(digest_size=8)
        for value in itertools.islice(values, VALUES_DIGESTED):
            if isinstance(value, self._torch.Tensor):
                digest.update(tensor_digest(value, BYTES_OF_A_TENSOR).encode())
            elif _is_plain(value):
                digest.update(repr(value).encode())
        return digest.hexdigest()

    def _count(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        held = arguments[0]
        if held not in self._known:
            kind = next(self._kinds[class_] for class_ in type(held).__mro__ if class_ in self._kinds)
            self._known[held] = (kind, self._made.get(kind, 0))
            self._made[kind] = self._made.get(kind, 0) + 1

    def _note_load(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._loads += 1
        known = self._known.get(arguments[0])
        if known is not None and self._loads <= LOADS_NOTED:
            kind, number = known
            self._journal.event("state_loaded", kind=kind, number=number, site=self._journal.site(frame))


def _optimizer_values(optimizer: Any) -> Iterator[Any]:
    """Yield the options and the state of an optimizer, in the order of its parameters."""
    for group in optimizer.param_groups:
        for name in sorted(group):
            if name != "params":
                yield group[name]
        for parameter in group["params"]:
            yield from optimizer.state.get(parameter, {}).values()


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
