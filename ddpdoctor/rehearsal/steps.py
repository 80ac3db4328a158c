"""Backward passes and optimizer steps."""

from __future__ import annotations

import functools
import sys
from typing import Any
from weakref import WeakKeyDictionary

from ..probe.journal import Journal
from .ending import Ending
from .modules import Modules
from .schedule import Schedule

NOTED = 4_000


class Steps:
    """Counts backwards and optimizer steps, and gives the ending its moments."""

    def __init__(self, journal: Journal, modules: Modules, schedule: Schedule, ending: Ending, torch: Any) -> None:
        self._journal = journal
        self._modules = modules
        self._schedule = schedule
        self._ending = ending
        self._torch = torch
        self._optimizers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def install(self) -> None:
        """Patch backward and register torch's own optimizer hooks."""
        autograd = self._torch.autograd
        backward = autograd.backward
        steps = self

        @functools.wraps(backward)
        def backward_noted(*arguments: Any, **options: Any) -> None:
            steps._ending.check()
            backward(*arguments, **options)
            steps._journal.guarded(steps._note_backward, sys._getframe(1))

        autograd.backward = backward_noted
        # The package hides its module of the same name.
        optimizer = sys.modules["torch.optim.optimizer"]
        optimizer.register_optimizer_step_pre_hook(self._before_step)
        optimizer.register_optimizer_step_post_hook(self._after_step)

    def _note_backward(self, frame: Any) -> None:
        journal = self._journal
        journal.backwards += 1
        if journal.backwards <= NOTED and journal.rank is not None:
            wraps, synchronised = self._modules.backward_ended()
            journal.event(
                "backward",
                ordinal=journal.backwards - 1,
                site=journal.site(frame),
                step=journal.step,
                wraps=wraps,
                synchronised=synchronised,
            )

    def _before_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        self._ending.check()
        self._journal.guarded(self._modules.close_iterations)

    def _after_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        journal = self._journal
        number = self._optimizers.setdefault(optimizer, len(self._optimizers))
        journal.optimizer_steps += 1
        if journal.optimizer_steps <= NOTED and journal.rank is not None:
            journal.event("optimizer_step", optimizer=number, site=journal.site(sys._getframe(1)))
        self._schedule.optimizer_stepped(number)
