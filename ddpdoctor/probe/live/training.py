"""Hooks around the phases of training: the fetch of a batch, forward, backward, the optimizer's step, saving.

Each hook runs the original whatever happens to its own part.
"""

from __future__ import annotations

import functools
import sys
import time
from threading import get_ident
from types import FrameType
from typing import Any, Optional

from ..capabilities import Capabilities
from ..optimizer_sizes import OptimizerSizes
from ..unseen import leave_no_frame
from .evidence import FORWARDS_NOTED, Evidence
from .host_reads import HostReads
from .observer import Observer, rows_of
from .passes import Passes
from .precision import COUNTED_FORWARD, Precision
from .reductions import Reducer, Reductions
from .steps import ACTIVE, CANDIDATE, Source
from .stopwatch import BACKWARD, DATA_WAIT, EVALUATION, FORWARD, OPTIMIZER, SAVING

_now_ns = time.monotonic_ns


class Training:
    """Replaces what a training loop calls."""

    def __init__(
        self,
        observer: Observer,
        torch: Any,
        capabilities: Capabilities,
        reductions: Reductions,
        evidence: Evidence,
        passes: Passes,
    ) -> None:
        self._observer = observer
        self._torch = torch
        self._capabilities = capabilities
        self._reductions = reductions
        self._evidence = evidence
        self._passes = passes
        self._sources: dict[int, Source] = {}
        self._sizes = OptimizerSizes(observer.journal, torch)
        self._precision = Precision(observer.journal, torch, capabilities.is_compiling)
        self._reads = HostReads(observer, torch, capabilities.is_compiling)
        self._backwards = 0
        """Backwards that are running; more than one when checkpointing recomputes inside of one."""

    def install(self) -> None:
        """Patch the classes and functions; each once a process."""
        torch = self._torch
        self._watch_loaders(torch.utils.data)
        self._watch_forwards(torch.nn.parallel.DistributedDataParallel)
        self._watch_backwards(torch.autograd)
        self._watch_saving(torch)
        # The package hides its module of the same name.
        optimizer = sys.modules["torch.optim.optimizer"]
        optimizer.register_optimizer_step_pre_hook(self._before_step)
        optimizer.register_optimizer_step_post_hook(self._after_step)

    def close(self) -> None:
        """No step is made any more: tell what was sampled, and take back what was replaced for that."""
        self._observer.journal.guarded(self._reads.finish, self._observer.steps.current + 1)

    def _watch_loaders(self, data: Any) -> None:
        iterator_class = self._capabilities.loader_iterator
        if iterator_class is None:
            return
        advance, iterate, training = iterator_class.__next__, data.DataLoader.__iter__, self
        observer = self._observer

        @functools.wraps(advance)
        def __next__(iterator: Any) -> Any:
            watched = observer.thread == get_ident()
            source = training._fetch_begins(iterator) if watched else None
            try:
                batch = advance(iterator)
            except BaseException as error:
                if watched:
                    training._fetch_failed(iterator, source, isinstance(error, StopIteration))
                leave_no_frame(error)
                raise
            if watched:
                training._fetch_ended(iterator, batch, sys._getframe(1))
            return batch

        @functools.wraps(iterate)
        def __iter__(loader: Any) -> Any:
            watched = observer.thread == get_ident()
            if watched:
                training._pause_begins(DATA_WAIT)
                observer.journal.guarded(training._passes.pass_is_asked_for, loader)
            try:
                iterator = iterate(loader)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                if watched:
                    training._pause_ended()
            if watched:
                training._remember(loader, iterator)
                observer.journal.guarded(training._passes.pass_begins, loader, iterator, sys._getframe(1))
            return iterator

        iterator_class.__next__, data.DataLoader.__iter__ = __next__, __iter__

    def _watch_forwards(self, ddp_class: Any) -> None:
        forward, training, observer = ddp_class.forward, self, self._observer
        is_compiling = self._capabilities.is_compiling

        @functools.wraps(forward)
        def forward_timed(ddp: Any, *arguments: Any, **options: Any) -> Any:
            if is_compiling() or observer.thread != get_ident():
                return forward(ddp, *arguments, **options)
            reducer = training._forward_begins(ddp, sys._getframe(1))
            try:
                return forward(ddp, *arguments, **options)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                training._forward_ended(ddp, reducer)

        ddp_class.forward = forward_timed

    def _watch_backwards(self, autograd: Any) -> None:
        backward, training, observer = autograd.backward, self, self._observer

        @functools.wraps(backward)
        def backward_timed(*arguments: Any, **options: Any) -> Any:
            watched = observer.thread == get_ident() and not training._backwards
            if watched:
                training._backward_begins()
            try:
                return backward(*arguments, **options)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                if watched:
                    training._backward_ended()

        autograd.backward = backward_timed

    def _watch_saving(self, torch: Any) -> None:
        save, training, observer = torch.save, self, self._observer

        @functools.wraps(save)
        def save_timed(*arguments: Any, **options: Any) -> Any:
            watched = observer.thread == get_ident()
            if watched:
                observer.journal.guarded(training._evidence.saves, arguments, options, sys._getframe(1))
                training._pause_begins(SAVING)
            try:
                return save(*arguments, **options)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                if watched:
                    training._pause_ended()

        torch.save = save_timed

    def _fetch_begins(self, iterator: Any) -> Any:
        observer = self._observer
        try:
            now_ns = _now_ns()
            number = iterator.__dict__.get("_ddpdoctor_number", -1)
            source = self._sources.get(number)
            if source is None:
                source = self._sources.setdefault(number, Source())
            observer.steps.fetch_begins(source, self._torch.is_grad_enabled(), now_ns)
            observer.watch.enter(EVALUATION if observer.steps.evaluating else DATA_WAIT, now_ns)
            return source
        except Exception as error:
            observer.fault("fetch", error)
            return None

    def _fetch_ended(self, iterator: Any, batch: Any, frame: FrameType) -> None:
        observer = self._observer
        try:
            now_ns = _now_ns()
            observer.watch.leave(now_ns)
            self._passes.drawn(iterator, batch, frame)
            fresh = iterator._num_workers > 0 and iterator._num_yielded == 1
            observer.steps.fetch_ended(rows_of(batch), fresh and self._has_started_workers(iterator), now_ns)
        except Exception as error:
            observer.fault("fetch", error)

    def _has_started_workers(self, iterator: Any) -> bool:
        """Tell whether a pass is the first of its workers."""
        known = "_ddpdoctor_served" in iterator.__dict__
        iterator._ddpdoctor_served = True
        return not known

    def _fetch_failed(self, iterator: Any, source: Any, exhausted: bool) -> None:
        observer = self._observer
        try:
            observer.watch.leave(_now_ns())
            if exhausted and source is not None:
                observer.steps.pass_ended(source)
                self._passes.pass_ended(iterator)
        except Exception as error:
            observer.fault("fetch", error)

    def _remember(self, loader: Any, iterator: Any) -> None:
        """Let an iterator know its loader's number."""
        try:
            number = loader.__dict__.get("_ddpdoctor_number")
            if number is None:
                number = len(self._sources)
                self._sources[number] = Source()
                object.__setattr__(loader, "_ddpdoctor_number", number)
            iterator._ddpdoctor_number = number
        except Exception:  # an iterator of the user's own takes no attributes
            return

    def _forward_begins(self, ddp: Any, frame: FrameType) -> Optional[Reducer]:
        observer, reducer = self._observer, None
        try:
            now_ns, steps = _now_ns(), observer.steps
            phase = FORWARD
            if self._torch.is_grad_enabled():
                steps.trains(now_ns)
                observer.journal.forwards += ddp.training
                reducer = self._reductions.forward_begins(ddp)
                if reducer.forwards == COUNTED_FORWARD:
                    observer.journal.guarded(self._begin_counting, ddp)
                if reducer.on_gpu and not self._reads.is_over:
                    observer.journal.guarded(self._sample_reads)
            else:
                if steps.state == CANDIDATE and not ddp.training:
                    steps.evaluating = True
                if steps.state != ACTIVE and (steps.state != CANDIDATE or steps.evaluating):
                    phase = EVALUATION
                    steps.pause(now_ns)
            if reducer is None or reducer.forwards <= FORWARDS_NOTED or self._passes.has_new_loader:
                self._evidence.forward_begins(ddp, frame)
            observer.watch.enter(phase, now_ns)
            if reducer is not None and steps.device_times is not None:
                steps.device_times.begins(FORWARD)
        except Exception as error:
            observer.fault("forward", error)
        return reducer

    def _forward_ended(self, ddp: Any, reducer: Optional[Reducer]) -> None:
        observer = self._observer
        try:
            observer.watch.leave(_now_ns())
            if reducer is not None:
                self._reductions.forward_ended(ddp, reducer)
                if reducer.forwards == COUNTED_FORWARD:
                    observer.journal.guarded(self._end_counting, ddp)
                if observer.steps.device_times is not None:
                    observer.steps.device_times.ends(FORWARD)
        except Exception as error:
            observer.fault("forward", error)

    def _begin_counting(self, ddp: Any) -> None:
        if self._precision.is_of_interest(ddp):
            self._precision.begins(ddp.module, ddp.device_type)

    def _end_counting(self, ddp: Any) -> None:
        wrap = self._evidence.wrap_number(ddp)
        self._precision.ended(ddp.module, -1 if wrap is None else wrap)

    def _sample_reads(self) -> None:
        self._reads.forward_begins(self._observer.steps.current)

    def _backward_begins(self) -> None:
        observer = self._observer
        self._backwards += 1
        try:
            now_ns = _now_ns()
            observer.steps.trains(now_ns)
            observer.watch.enter(BACKWARD, now_ns)
            if observer.steps.device_times is not None:
                observer.steps.device_times.begins(BACKWARD)
        except Exception as error:
            observer.fault("backward", error)

    def _backward_ended(self) -> None:
        observer = self._observer
        self._backwards -= 1
        try:
            now_ns = _now_ns()
            observer.watch.leave(now_ns)
            observer.journal.backwards += 1
            averages = self._reductions.backward_ended(observer.watch.tally)
            observer.steps.backward_ended(now_ns)
            if observer.steps.device_times is not None:
                observer.steps.device_times.ends(BACKWARD)
            self._passes.backward_ended(averages)
        except Exception as error:
            observer.fault("backward", error)

    def _before_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        observer = self._observer
        if observer.thread != get_ident() or self._capabilities.is_compiling():
            return
        try:
            observer.watch.enter(OPTIMIZER, _now_ns())
            if observer.steps.device_times is not None:
                observer.steps.device_times.begins(OPTIMIZER)
        except Exception as error:
            observer.fault("optimizer", error)

    def _after_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        observer = self._observer
        if observer.thread != get_ident() or self._capabilities.is_compiling():
            return
        try:
            now_ns = _now_ns()
            observer.watch.leave(now_ns)
            observer.journal.optimizer_steps += 1
            if observer.steps.device_times is not None:
                observer.steps.device_times.ends(OPTIMIZER)
            observer.steps.optimizer_stepped(id(optimizer), now_ns)
            self._sizes.stepped(optimizer)
        except Exception as error:
            observer.fault("optimizer", error)

    def _pause_begins(self, phase: int) -> None:
        """Something begins that belongs to no step, once the optimizer has stepped."""
        observer = self._observer
        try:
            now_ns = _now_ns()
            observer.steps.pause(now_ns)
            observer.watch.enter(phase, now_ns)
        except Exception as error:
            observer.fault("pause", error)

    def _pause_ended(self) -> None:
        observer = self._observer
        try:
            observer.watch.leave(_now_ns())
        except Exception as error:
            observer.fault("pause", error)
