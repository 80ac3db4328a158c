"""One injected cause: a loss of one rank that is not a number, a short last batch, a slow rank 0."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

from ..journal import Journal
from ..torch_compat import replaces
from .data.lengths import short_batch_samples
from .schedule import Trail

NAN, SHORT_BATCH, SLOW_RANK = "nan", "short-batch", "slow-rank0"
STRESSED_RANK = 1
"""The rank with a loss unlike the others', and with a short last batch where no loader shows its length."""
NAN_STEP = 3
"""Training forward whose output is not a number; those before show that the script works."""
SLOW_STEP = 2
"""Optimizer step after which rank 0 is slow."""
FALLBACK_TIMEOUT_S = 600.0
"""How long rank 0 is slow where a group's timeout is not known: NCCL's default."""
_CLOCKS = ("time", "monotonic", "perf_counter")


class Stress:
    """The cause that the plan names, injected; none in a plan without one."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._kind = str(journal.plan.get("stress") or "")
        self._forwards = 0
        self._steps = 0
        self._late_s = 0.0
        """How much later it is by the user's clocks than it is."""

    def before_torch(self) -> None:
        """Replace the clocks by some that can be put forward, before the user's code imports them by name."""
        if self._kind == SLOW_RANK:
            for name in _CLOCKS:
                setattr(time, name, self._clock(getattr(time, name), 1))
                setattr(time, name + "_ns", self._clock(getattr(time, name + "_ns"), 10**9))

    def after_torch(self, torch: Any) -> None:
        """Install what needs torch."""
        if self._kind == NAN:
            self._poison_forward(torch)
        elif self._kind == SLOW_RANK:
            # The package hides its module of the same name.
            optimizer = sys.modules["torch.optim.optimizer"]
            optimizer.register_optimizer_step_post_hook(lambda *step: self._after_step())

    def hand_out(self, trail: Trail, batch: Any, inner: Any) -> Any:
        """Return the batch that the user gets: the last of a training pass is short where the loader's own is."""
        if self._kind != SHORT_BATCH or not trail.backwards:
            return batch
        batches = int(self._journal.plan.get("batches", 4))
        if trail.yielded != min(batches, trail.true):
            return batch
        ranks_of_job = int((self._journal.plan.get("job") or {}).get("ranks_of_job") or 0)
        samples = self._journal.guarded(short_batch_samples, inner, ranks_of_job, harms=())
        if samples is None and self._journal.rank == STRESSED_RANK:
            samples = 1
        elif not samples or trail.true <= batches:
            # Every batch is full, or the pass is so short that this one is the loader's own last.
            return batch
        short = self._journal.guarded(self._cut, batch, samples, harms=())
        return batch if short is None else short

    def _cut(self, batch: Any, samples: int) -> Any:
        """Return the first so many samples of a batch, and fewer than it has; None where it cannot be cut so."""
        import torch

        sizes = {len(leaf) for leaf in _leaves(batch, torch) if leaf.dim()}
        if len(sizes) != 1:
            return None
        (size,) = sizes
        # A batch of one sample is a case of its own, which a last batch of several does not show.
        kept = min(samples, size - 1)
        if kept < min(samples, 2):
            return None
        self._journal.event("stressed")
        return _mapped(batch, lambda leaf: leaf[:kept] if _length(leaf) == size else leaf, torch)

    def _poison_forward(self, torch: Any) -> None:
        ddp_class = torch.nn.parallel.DistributedDataParallel

        @replaces("forward", ddp_class)
        def forward_poisoned(forward: Any, ddp: Any, *arguments: Any, **options: Any) -> Any:
            output = forward(ddp, *arguments, **options)
            if self._journal.rank == STRESSED_RANK and torch.is_grad_enabled() and ddp.training:
                self._forwards += 1
                if self._forwards == NAN_STEP:
                    self._journal.event("stressed")
                    return _mapped(output, lambda leaf: _not_a_number(leaf, torch), torch)
            return output

    def _after_step(self) -> None:
        self._steps += 1
        if self._journal.rank == 0 and self._steps == SLOW_STEP:
            self._late_s = float(self._journal.guarded(self._timeout_s, harms=()) or FALLBACK_TIMEOUT_S)
            self._journal.event("stressed")

    def _timeout_s(self) -> float:
        import torch

        group = torch.distributed.group.WORLD
        seconds = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        return float(seconds)

    def _clock(self, clock: Callable[[], Any], unit: int) -> Callable[[], Any]:
        """Return a clock of ``time``, in ``unit`` to the second, that is put forward for the user's own code."""
        holds = self._journal.user_code.holds

        @functools.wraps(clock)
        def user_clock() -> Any:
            now = clock()
            if self._late_s and holds(sys._getframe(1).f_code.co_filename):
                return now + type(now)(self._late_s * unit)
            return now

        return user_clock


def _leaves(value: Any, torch: Any) -> list[Any]:
    """Return the tensors of nested lists, tuples and mappings."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        return leaf

    _mapped(value, note, torch)
    return found


def _mapped(value: Any, change: Callable[[Any], Any], torch: Any) -> Any:
    """Return the same structure with each leaf changed; objects of other kinds stay what they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict) and type(value) is dict:
        return {key: _mapped(item, change, torch) for key, item in value.items()}
    if type(value) in (list, tuple):
        whole = change(value)
        return type(value)(_mapped(item, change, torch) for item in value) if whole is value else whole
    if isinstance(value, dict) and hasattr(value, "to_tuple"):  # outputs of Hugging Face models
        for key, item in list(value.items()):
            value[key] = _mapped(item, change, torch)
    return value


def _length(value: Any) -> int:
    """Return the samples of a leaf with a batch: a tensor's first dimension, or a list of texts, numbers; else -1."""
    if hasattr(value, "dim"):
        return int(value.shape[0]) if value.dim() else -1
    plain = isinstance(value, list) and all(isinstance(item, (str, int, float)) for item in value)
    return len(value) if plain else -1


def _not_a_number(leaf: Any, torch: Any) -> Any:
    return leaf * float("nan") if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
