"""Hooks around the phases of training: the fetch of a batch, forward, backward, the optimizer's step, saving.

Each hook runs the original whatever happens to its own part.
"""

from __future__ import annotations

import functools
import sys
import time
from threading import get_ident
from typing import Any, Callable, Optional

from ..capabilities import Capabilities
from ..optimizer_sizes import OptimizerSizes
from ..unseen import leave_no_frame
from .evidence import FORWARDS_NOTED, Evidence
from .host_reads import HostReads
from .observer import Observer, rows_of
from .passes import Pass, Passes
from .precision import COUNTED_FORWARD, Precision
from .reductions import Reducer, Reductions
from .steps import Source
from .stopwatch import BACKWARD, DATA_WAIT, FORWARD, OPTIMIZER, SAVING

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
        self._keep, self._make_room = observer.moments.keep, observer.moments.make_room
        # Kept as they are: to bind a method anew for each moment takes as long as to keep the moment.
        course = observer.course
        self._fetch_has_begun, self._fetch_has_ended = course.fetch_began, course.fetch_ended
        self._forward_has_begun, self._phase_has_ended = reductions.forward_began, observer.watch.leave
        self._backward_has_begun, self._backward_has_ended = course.backward_began, self._take_in_backward
        self._optimizer_has_begun, self._optimizer_has_stepped = observer.watch.enter, course.optimizer_stepped
        self._torch = torch
        self._capabilities = capabilities
        self._is_compiling = capabilities.is_compiling
        self._is_recording: Callable[[], bool] = torch.is_grad_enabled
        self._reductions = reductions
        self._evidence = evidence
        self._passes = passes
        self._sources: list[Source] = []
        """Of each loader, by its number."""
        self._unknown = Source()
        """The loader of every iterator that has not said whose it is."""
        self._sizes = OptimizerSizes(observer.journal, torch)
        self._precision = Precision(observer.journal, torch, capabilities.is_compiling)
        self._reads = HostReads(observer, torch, capabilities.is_compiling)

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
        self._observer.moments.take_in()
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
                training._fetch_ended(iterator, batch)
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
        is_compiling = self._is_compiling

        @functools.wraps(forward)
        def forward_timed(ddp: Any, *arguments: Any, **options: Any) -> Any:
            if is_compiling() or (observer.thread != get_ident() and not (ddp.training and observer.adopts())):
                return forward(ddp, *arguments, **options)
            reducer = training._forward_begins(ddp)
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
            watched = observer.thread == get_ident() and not observer.backwards
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

    def _fetch_begins(self, iterator: Any) -> Optional[Source]:
        try:
            now_ns = _now_ns()
            source: Source = iterator.__dict__.get("_ddpdoctor_source", self._unknown)
            self._keep((self._fetch_has_begun, (source, self._is_recording(), now_ns)))
            return source
        except Exception as error:
            self._observer.fault("fetch", error)
            return None

    def _fetch_ended(self, iterator: Any, batch: Any) -> None:
        try:
            now_ns = _now_ns()
            fresh = iterator._num_workers > 0 and iterator._num_yielded == 1
            started_workers = fresh and self._has_started_workers(iterator)
            self._keep((self._fetch_has_ended, (rows_of(batch), started_workers, now_ns)))
            self._passes.drawn(iterator, batch)
        except Exception as error:
            self._observer.fault("fetch", error)

    def _has_started_workers(self, iterator: Any) -> bool:
        """Tell whether a pass is the first of its workers."""
        known = "_ddpdoctor_served" in iterator.__dict__
        iterator._ddpdoctor_served = True
        return not known

    def _fetch_failed(self, iterator: Any, source: Optional[Source], exhausted: bool) -> None:
        try:
            self._keep((self._observer.course.fetch_failed, (source if exhausted else None, _now_ns())))
            self._make_room()
            if exhausted and source is not None:
                self._passes.pass_ended(iterator)
        except Exception as error:
            self._observer.fault("fetch", error)

    def _remember(self, loader: Any, iterator: Any) -> None:
        """Let an iterator know its loader as a source of steps."""
        try:
            number = loader.__dict__.get("_ddpdoctor_number")
            if number is None:
                number = len(self._sources)
                self._sources.append(Source())
                object.__setattr__(loader, "_ddpdoctor_number", number)
            iterator._ddpdoctor_source = self._sources[number]
        except Exception:  # an iterator of the user's own takes no attributes
            return

    def _forward_begins(self, ddp: Any) -> Optional[Reducer]:
        """What is known of the module's reducer; None where no gradients are recorded."""
        observer = self._observer
        try:
            now_ns, training = _now_ns(), ddp.training
            self._make_room()
            if not self._is_recording():
                self._keep((observer.course.forward_began, (False, training, now_ns)))
                self._evidence.forward_begins(ddp, sys._getframe(2))
                return None
            reducer = self._reductions.reducer_of(ddp)
            reducer.forwards += 1
            reducer.synchronises = synchronises = bool(ddp.require_backward_grad_sync)
            self._keep((self._forward_has_begun, (reducer, synchronises, training, now_ns)))
            if reducer.forwards == COUNTED_FORWARD:
                observer.journal.guarded(self._begin_counting, ddp)
            if reducer.forwards <= FORWARDS_NOTED or self._passes.has_new_loader:
                self._evidence.forward_begins(ddp, sys._getframe(2))
            if observer.on_device:
                self._device_begins(FORWARD)
            if reducer.on_gpu and not self._reads.is_over:
                observer.journal.guarded(self._sample_reads)
            return reducer
        except Exception as error:
            observer.fault("forward", error)
            return None

    def _forward_ended(self, ddp: Any, reducer: Optional[Reducer]) -> None:
        observer = self._observer
        try:
            now_ns = _now_ns()
            self._keep((self._phase_has_ended, (now_ns,)))
            if reducer is not None:
                if reducer.synchronises:
                    self._reductions.forward_ended(ddp, reducer, now_ns)
                if reducer.forwards == COUNTED_FORWARD:
                    observer.journal.guarded(self._end_counting, ddp)
                if observer.on_device:
                    self._device_ends(FORWARD)
        except Exception as error:
            observer.fault("forward", error)

    def _begin_counting(self, ddp: Any) -> None:
        if self._precision.is_of_interest(ddp):
            self._precision.begins(ddp.module, ddp.device_type)

    def _end_counting(self, ddp: Any) -> None:
        wrap = self._evidence.wrap_number(ddp)
        self._precision.ended(ddp.module, -1 if wrap is None else wrap)

    def _sample_reads(self) -> None:
        self._observer.moments.take_in()
        self._reads.forward_begins(self._observer.steps.current)

    def _backward_begins(self) -> None:
        observer = self._observer
        observer.backwards += 1
        try:
            self._keep((self._backward_has_begun, (_now_ns(),)))
            if observer.on_device:
                self._device_begins(BACKWARD)
        except Exception as error:
            observer.fault("backward", error)

    def _backward_ended(self) -> None:
        observer = self._observer
        observer.backwards -= 1
        try:
            self._keep((self._backward_has_ended, (self._passes.newest, _now_ns())))
            if observer.on_device:
                self._device_ends(BACKWARD)
        except Exception as error:
            observer.fault("backward", error)

    def _take_in_backward(self, newest: Optional[Pass], now_ns: int) -> None:
        """Taken in later: a backward is over, made with the newest batch of a pass."""
        self._passes.backward_ended(newest, self._reductions.backward_ended(now_ns))

    def _device_begins(self, phase: int) -> None:
        """A phase begins on a GPU: which step that is of must be known at once."""
        self._observer.moments.take_in()
        if self._observer.steps.device_times is not None:
            self._observer.steps.device_times.begins(phase)

    def _device_ends(self, phase: int) -> None:
        self._observer.moments.take_in()
        if self._observer.steps.device_times is not None:
            self._observer.steps.device_times.ends(phase)

    def _before_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        observer = self._observer
        if observer.thread != get_ident() or self._is_compiling():
            return
        try:
            self._keep((self._optimizer_has_begun, (OPTIMIZER, _now_ns())))
            if observer.on_device:
                self._device_begins(OPTIMIZER)
        except Exception as error:
            observer.fault("optimizer", error)

    def _after_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        observer = self._observer
        if observer.thread != get_ident() or self._is_compiling():
            return
        try:
            now_ns = _now_ns()
            if observer.on_device:
                self._device_ends(OPTIMIZER)  # before the step may be over
            self._keep((self._optimizer_has_stepped, (id(optimizer), now_ns)))
            if id(optimizer) not in self._sizes.measured:
                self._sizes.stepped(optimizer)
        except Exception as error:
            observer.fault("optimizer", error)

    def _pause_begins(self, phase: int) -> None:
        """Something begins that belongs to no step, once the optimizer has stepped."""
        self._keep((self._observer.course.pause_began, (phase, _now_ns())))

    def _pause_ended(self) -> None:
        self._keep((self._phase_has_ended, (_now_ns(),)))
