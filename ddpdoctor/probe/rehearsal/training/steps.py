"""Backward passes and optimizer steps."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from ...facts.optimizer_sizes import OptimizerSizes
from ...journal import Journal
from ..collectives.reduced_losses import ReducedLosses
from ..data.loaders import Loaders
from ..environment.cpu_threads import CpuThreads
from ..schedule import Schedule
from ..stop import Ending
from ..time_budget import Pace
from .ddp_modules import Modules
from .parameters_without_optimizer import Unheld
from .replicas import Replicas
from .training_state import TrainingState
from .written_averages import note_written_averages

NOTED = 4_000


class Steps:
    """The counts of backwards and optimizer steps, at which the rehearsal may end."""

    def __init__(
        self,
        journal: Journal,
        modules: Modules,
        loaders: Loaders,
        schedule: Schedule,
        pace: Pace,
        ending: Ending,
        torch: Any,
        reduced: ReducedLosses,
    ) -> None:
        self._journal = journal
        self._modules = modules
        self._loaders = loaders
        self._schedule = schedule
        self._pace = pace
        self._ending = ending
        self._torch = torch
        self._replicas = Replicas(journal, modules)
        self._unheld = Unheld(journal, modules)
        self._state = TrainingState(journal, torch, self._replicas)
        self._sizes = OptimizerSizes(journal, torch, 1, any_device=journal.plan.get("device") != "cuda")
        self._threads = CpuThreads(journal, torch)
        self._reduced = reduced
        self._optimizers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._made = 0
        self._ordinals: dict[int, int] = {}
        self._taken = 0
        self._running = 0
        """Backwards that are running: more than one when checkpointing recomputes inside of one."""

    def install(self) -> None:
        """Patch backward and register torch's own optimizer hooks."""
        self._hook_backward(self._torch.autograd)
        self._unheld.install()
        self._state.install()
        self._threads.install()
        # The package hides its module of the same name.
        optimizer = sys.modules["torch.optim.optimizer"]
        optimizer.register_optimizer_step_pre_hook(self._before_step)
        optimizer.register_optimizer_step_post_hook(self._after_step)

    def _hook_backward(self, autograd: Any) -> None:
        backward, take, steps = autograd.backward, autograd.grad, self

        @functools.wraps(backward)
        def backward_noted(*arguments: Any, **options: Any) -> None:
            if steps._running:
                backward(*arguments, **options)
                return
            steps._ending.check()
            begun = steps._journal.guarded(steps._modules.backward_begins, harms=("backwards",)) or ([], [])
            steps._journal.guarded(steps._before_backward, arguments, options, sys._getframe(1), harms=("backwards",))
            steps._running += 1
            try:
                backward(*arguments, **options)
            except BaseException:
                steps._journal.guarded(steps._modules.backward_failed, harms=("backwards", "missing_gradients"))
                raise
            finally:
                steps._running -= 1
            steps._journal.guarded(
                steps._note_backward, sys._getframe(1), begun, _keeps_graph(arguments, options), harms=("backwards",)
            )

        @functools.wraps(take)
        def grad_noted(outputs: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(inputs, Iterator):
                inputs = tuple(inputs)
            result = take(outputs, inputs, *arguments, **options)
            steps._journal.guarded(steps._note_taken, inputs, sys._getframe(1), harms=("gradients_taken",))
            return result

        autograd.backward, autograd.grad = backward_noted, grad_noted

    def _before_backward(self, arguments: Any, options: Any, frame: Any) -> None:
        roots = arguments[0] if arguments else options.get("tensors", ())
        self._reduced.before_backward(roots, self._journal.site(frame))

    def _note_backward(self, frame: Any, begun: tuple[list[int], list[int]], keeps_graph: bool) -> None:
        journal = self._journal
        journal.backwards += 1
        self._loaders.trained()
        self._pace.backward_ended()
        fates = self._modules.backward_ended(keeps_graph)
        if journal.backwards <= NOTED and journal.rank is not None:
            journal.event(
                "backward",
                ordinal=journal.backwards - 1,
                site=journal.site(frame),
                step=journal.step,
                wraps=list(fates),
                synchronised=[wrap for wrap, fate in fates.items() if not fate],
                unreduced=[{"wrap": wrap, "why": fate} for wrap, fate in fates.items() if fate],
                accumulated=[wrap for wrap in begun[0] if wrap in fates],
                inside_no_sync=[wrap for wrap in begun[1] if wrap in fates],
            )

    def _note_taken(self, inputs: Any, frame: Any) -> None:
        """Note gradients of parameters that were computed as values."""
        owners = [self._modules.name_of(item) for item in (inputs if isinstance(inputs, (list, tuple)) else (inputs,))]
        wraps = sorted({owner[0] for owner in owners if owner is not None})
        if not wraps:
            return
        self._taken += 1
        if self._taken <= NOTED and self._journal.rank is not None:
            self._journal.event("gradients_taken", wraps=wraps, site=self._journal.site(frame))

    def _before_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        self._ending.check()
        self._journal.guarded(self._modules.close_iterations, harms=("backwards", "missing_gradients"))
        if self._journal.is_rank:
            number, ordinal = self._place(optimizer)
            if not self._ordinals:
                self._journal.guarded(self._state.note_first_step, harms=("training_states",))
                self._journal.guarded(note_written_averages, self._journal, harms=("written_averages",))
                self._journal.guarded(self._threads.note_threads, harms=("cpu_threads",))
            self._journal.guarded(
                self._replicas.before_step,
                optimizer,
                number,
                ordinal,
                harms=("gradient_digests", "parameter_digests", "unheld_parameters"),
            )
            self._journal.guarded(
                self._unheld.before_step,
                optimizer,
                ordinal,
                harms=("gradient_digests", "parameter_digests", "unheld_parameters"),
            )

    def _after_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        journal = self._journal
        number, ordinal = self._place(optimizer)
        self._ordinals[number] = ordinal + 1
        journal.optimizer_steps += 1
        if journal.optimizer_steps <= NOTED and journal.rank is not None:
            journal.guarded(
                self._note_step,
                optimizer,
                number,
                ordinal,
                sys._getframe(1),
                harms=("optimizer_steps", "parameter_digests"),
            )
        self._schedule.optimizer_stepped(number)

    def _note_step(self, optimizer: Any, number: int, ordinal: int, frame: Any) -> None:
        wraps, elements = self._replicas.scope_of(optimizer)
        self._journal.event(
            "optimizer_step",
            optimizer=number,
            ordinal=ordinal + 1,
            site=self._journal.site(frame),
            wraps=wraps,
            elements=elements,
            learning_rates=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group][:16],
        )
        if self._journal.is_rank:
            self._replicas.after_step(optimizer, number, ordinal)
            self._journal.guarded(self._sizes.stepped, optimizer, harms=("optimizer_sizes",))
            self._journal.guarded(self._unheld.after_step, optimizer, ordinal, harms=("unheld_parameters",))

    def _place(self, optimizer: Any) -> tuple[int, int]:
        """Return the number of an optimizer, and how many steps it has made."""
        number = self._optimizers.get(optimizer)
        if number is None:
            number, self._made = self._made, self._made + 1
            self._optimizers[optimizer] = number
        return number, self._ordinals.get(number, 0)


def _keeps_graph(arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether a backward leaves its graph for another one: ``retain_graph`` or ``create_graph``."""
    keeps = options.get("retain_graph", arguments[2] if len(arguments) > 2 else None)
    creates = options.get("create_graph", arguments[3] if len(arguments) > 3 else False)
    return bool(creates if keeps is None else keeps)
