"""Hooks around the phases of training: the fetch of a batch, forward, backward, the optimizer's step, saving.

Each hook runs the original whatever happens to its own part. What it does in every step stands in the one function
that takes the original's place, on names that were looked up before: between two hooks a step drives what is ours out
of the processor's caches, and then each further function, method and attribute costs about a microsecond.

That is why these hooks and a rehearsal's (``probe/rehearsal/data/loaders.py``, ``probe/rehearsal/training/steps.py``)
are two, and not two subscribers of one: calling a subscriber at each of the eight stamps of a step takes 12.3 µs in a
real step, where noting them in place takes 6.2 µs. In a loop of their own it is 3.1 instead of 1.1 µs, and the hooks as
a whole cost 22% more (CPU of the training thread, Python 3.11, torch 2.13, ``python -m
tests.benchmarks.dispatch_cost``; what all of them cost stands in ``docs/measures.md``). A rehearsal's have another task
besides: they end passes, count what is read ahead, and may end the process, where these only note. What is not called
in every step goes in both through ``probe/user_code.py``.
"""

from __future__ import annotations

import functools
import sys
import time
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, Callable, NamedTuple, Optional
from weakref import WeakKeyDictionary

from ..nonfinite import NonFinite, Sample
from ..observed import OptimizerSizes, follow_reads, user_reader
from ..torch_compat import Capabilities
from ..user_code import leave_no_frame
from .clocks import BACKWARD, DATA_WAIT, FORWARD, OPTIMIZER, SAVING
from .ddp_events import FORWARDS_NOTED, Evidence
from .loaders import Pass, Passes
from .observer import Observer, rows_of
from .reductions import Reducer, Reductions, ReplicaDigests
from .steps import ACTIVE, STEPPED, Source

# Training forwards that no backward followed: where no loader counts, they alone show that a rank left a step out.

NONE_OPEN = -1
MOST_WRITTEN = 64
"""Events of one module: a loop with several forwards for each backward has one a step, on every rank."""


class Unfollowed(NamedTuple):
    """Forwards that will have been left out if a backward follows the newest."""

    forwards: int
    step: int
    site: int


class UnfollowedForwards:
    """The forwards of each DDP module that are not the first since the newest backward."""

    def __init__(self, observer: Observer, wrap_number: Callable[[Any], Optional[int]]) -> None:
        self._observer = observer
        self._wrap_number = wrap_number
        self._written: dict[int, int] = {}

    def look(self, ddp: Any, reducer: Reducer, place: tuple[Any, ...], frame: FrameType) -> None:
        """Count a forward at a ``place`` that begins after an open one, or after some that were not followed."""
        if reducer.opened_at != self._observer.backwards_over:
            self._write(ddp, reducer)
        elif reducer.place != place:
            reducer.unfollowed = None
        elif reducer.unfollowed is not None:
            reducer.unfollowed = reducer.unfollowed._replace(forwards=reducer.unfollowed.forwards + 1)
        else:
            self._observer.moments.take_in()
            site = self._observer.journal.site(frame)
            reducer.unfollowed = Unfollowed(1, self._observer.steps.of_newest_forward, site)

    def _write(self, ddp: Any, reducer: Reducer) -> None:
        """Write the forwards before the newest one, which are certain once a backward has followed that."""
        found, wrap = reducer.unfollowed, self._wrap_number(ddp)
        reducer.unfollowed = None
        if found is None or wrap is None:
            return
        written = self._written[wrap] = self._written.get(wrap, 0) + 1
        if written <= MOST_WRITTEN:
            self._observer.journal.event(
                "unfollowed_forward", wrap=wrap, last=written == MOST_WRITTEN, **found._asdict()
            )


# The lines of the user's that read a result back from the GPU, and how long they wait for it, counted for some
# steps.

FIRST_AFTER = 20
"""Steps before the first that is sampled: by then what is compiled is compiled."""
SAMPLED = 20
MOST_PLACES = 50


class Place:
    """One line that reads in one way."""

    __slots__ = ("calls", "newest", "site", "steps", "wait_ns")

    def __init__(self, site: int) -> None:
        self.site = site
        self.calls = self.steps = self.newest = self.wait_ns = 0


class HostReads:
    """The sampling of one rank."""

    def __init__(self, observer: Observer, torch: Any, is_compiling: Callable[[], bool]) -> None:
        self._observer = observer
        self._tensor_class = torch.Tensor
        self._is_compiling = is_compiling
        self._first = 0
        """The first step that is sampled; 0 before the first training forward."""
        self._installed: dict[str, tuple[Any, Any]] = {}
        """As ``follow_reads`` returns it."""
        self._places: dict[tuple[str, CodeType, int], Place] = {}
        self.is_over = False

    def waits_for_gpu(self, tensor: Any) -> bool:
        """Return whether reading a tensor waits for a GPU."""
        return bool(tensor.is_cuda)

    def forward_begins(self, step: int) -> None:
        """Begin or end the sampling where a training forward of a model on a GPU begins, in the step of this number."""
        if not self._first:
            self._first = step + FIRST_AFTER
        elif step >= self._first + SAMPLED:
            self.finish(step)
        elif step >= self._first and not self._installed:
            self._first = step
            self._installed = follow_reads(
                self._observer.journal, self._tensor_class, self._is_watched, self._note_read
            )

    def finish(self, step: int) -> None:
        """Stop sampling before the step of this number, and report what was seen."""
        if self.is_over:
            return
        self.is_over = True
        for name, (replacement, own) in self._installed.items():
            if self._tensor_class.__dict__.get(name) is not replacement:
                continue  # Other code has replaced ours, and calls it.
            if own is None:
                delattr(self._tensor_class, name)
            else:
                setattr(self._tensor_class, name, own)
        steps = step - self._first
        for (name, _, _), place in self._places.items():
            if steps > 0:
                self._observer.journal.event(
                    "host_read",
                    method=name,
                    site=place.site,
                    calls=place.calls,
                    steps_with=min(place.steps, steps),
                    steps=steps,
                    wait_ns=place.wait_ns,
                )

    def _is_watched(self) -> bool:
        return not self.is_over and not self._is_compiling() and self._observer.thread == get_ident()

    def _note_read(self, name: str, tensor: Any, frame: FrameType, wait_ns: int) -> None:
        steps = self._observer.steps
        self._observer.moments.take_in()
        if steps.state not in (ACTIVE, STEPPED) or not self.waits_for_gpu(tensor):
            return
        reader = user_reader(frame, self._observer.journal.user_code)
        if reader is None:
            return
        key = (name, reader.f_code, reader.f_lasti)
        place = self._places.get(key)
        if place is None:
            if len(self._places) >= MOST_PLACES:
                return
            place = self._places[key] = Place(self._observer.journal.site(reader))
        place.calls += 1
        place.wait_ns += wait_ns
        if steps.current != place.newest:
            place.newest = steps.current
            place.steps += 1


_now_ns = time.monotonic_ns
ROOM_MADE_EVERY = 16
"""Training forwards between two looks at how many moments wait."""


class Training:
    """Replacements of what a training loop calls."""

    def __init__(
        self,
        observer: Observer,
        torch: Any,
        capabilities: Capabilities,
        reductions: Reductions,
        evidence: Evidence,
        passes: Passes,
        nonfinite: NonFinite,
        digests: ReplicaDigests,
    ) -> None:
        self._observer = observer
        self._nonfinite = nonfinite
        self._digests = digests
        self._keep = observer.moments.keep
        self._torch = torch
        self._capabilities = capabilities
        self._is_compiling = capabilities.is_compiling
        self._is_recording: Callable[[], bool] = torch.is_grad_enabled
        self._reductions = reductions
        self._evidence = evidence
        self._passes = passes
        self._sources: WeakKeyDictionary[Any, Source] = WeakKeyDictionary()
        """Of each loader that lives: some scripts make one in each epoch."""
        self._unknown = Source()
        """The loader of every iterator that is not linked to it yet."""
        self._sizes = OptimizerSizes(observer.journal, torch)
        self._reads = HostReads(observer, torch, capabilities.is_compiling)
        self._unfollowed = UnfollowedForwards(observer, evidence.wrap_number)

    def install(self) -> None:
        """Patch the classes and functions; each once a process."""
        torch = self._torch
        self._hook_loaders(torch.utils.data)
        self._hook_forwards(torch.nn.parallel.DistributedDataParallel)
        self._hook_backwards(torch.autograd)
        self._hook_saving(torch)
        # The package hides its module of the same name.
        self._hook_optimizers(sys.modules["torch.optim.optimizer"])

    def close(self) -> None:
        """Report what was sampled, as no step is made any more, and take back what was replaced for that."""
        self._observer.moments.take_in()
        self._observer.journal.guarded(self._digests.write, harms=("replica_digests",))
        self._observer.journal.guarded(self._nonfinite.close, harms=("nonfinites",))
        self._observer.journal.guarded(self._reads.finish, self._observer.steps.current + 1, harms=("host_reads",))

    def _hook_loaders(self, data: Any) -> None:
        iterator_class = self._capabilities.loader_iterator
        if iterator_class is None:
            return
        advance, iterate, training = iterator_class.__next__, data.DataLoader.__iter__, self
        observer, passes, unknown, is_recording = self._observer, self._passes, self._unknown, self._is_recording
        keep, fetch_began, fetch_ended = self._keep, observer.course.fetch_began, observer.course.fetch_ended
        tensor_class, batch_came = self._torch.Tensor, self._nonfinite.batch_came

        @functools.wraps(advance)
        def __next__(iterator: Any) -> Any:
            watched, source = observer.thread == get_ident(), None
            if watched:
                try:
                    began_ns, own = _now_ns(), iterator.__dict__
                    source = own.get("_ddpdoctor_source", unknown)
                    keep((fetch_began, source, is_recording(), began_ns))
                except Exception as error:
                    observer.fault("fetch", error, harms=("step_tracks",))
                    source = None
            try:
                batch = advance(iterator)
            except BaseException as error:
                if watched:
                    training._fetch_failed(iterator, source, isinstance(error, StopIteration))
                leave_no_frame(error)
                raise
            if watched:
                try:
                    ended_ns, own = _now_ns(), iterator.__dict__
                    current = own.get("_ddpdoctor_pass")
                    looked = current is None or current.yielded in current.looks
                    kind = type(batch)
                    if (kind is list or kind is tuple) and batch:
                        first = batch[0]
                    else:
                        first = next(iter(batch.values())) if kind is dict and batch else batch
                    if type(first) is tensor_class:  # As in `rows_of`, in a third of the time.
                        shape = first.shape
                        samples = shape[0] if shape else 1
                    else:
                        samples = rows_of(batch)
                    keep((fetch_ended, samples, looked and training._has_started_workers(iterator), ended_ns))
                    if current is not None:
                        if looked:
                            passes.look(current, iterator, batch, sys._getframe(1))
                        current.yielded += 1
                        passes.newest = current
                    batch_came(batch)
                except Exception as error:
                    observer.fault("fetch", error, harms=("step_tracks",))
            return batch

        @functools.wraps(iterate)
        def __iter__(loader: Any) -> Any:
            watched = observer.thread == get_ident()
            if watched:
                training._pause_begins(DATA_WAIT)
                observer.journal.guarded(training._passes.pass_is_requested, loader, harms=("passes",))
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
                observer.journal.guarded(
                    training._passes.pass_begins, loader, iterator, sys._getframe(1), harms=("passes",)
                )
            return iterator

        iterator_class.__next__, data.DataLoader.__iter__ = __next__, __iter__

    def _hook_forwards(self, ddp_class: Any) -> None:
        forward, training, observer = ddp_class.forward, self, self._observer
        is_compiling, is_recording, keep = self._is_compiling, self._is_recording, self._keep
        reductions, known, phase_ended = self._reductions, self._reductions.known, observer.watch.leave
        forward_began, getframe, nonfinite = reductions.forward_began, sys._getframe, self._nonfinite
        sequence = nonfinite.sequence

        @functools.wraps(forward)
        def forward_timed(ddp: Any, *arguments: Any, **options: Any) -> Any:
            if is_compiling():
                return forward(ddp, *arguments, **options)
            if observer.thread != get_ident() and not (ddp.training and observer.adopts()):
                observer.journal.guarded(reductions.leave_alone, ddp, harms=())
                return forward(ddp, *arguments, **options)
            reducer: Optional[Reducer] = None
            looked = False
            try:
                if is_recording():
                    reducer, synchronises = known.get(id(ddp)) or reductions.meet(ddp), ddp.require_backward_grad_sync
                    keep((forward_began, reducer, synchronises, ddp.training, _now_ns()))
                    reducer.forwards = forwards = reducer.forwards + 1
                    if not synchronises:
                        reducer.kept_local += 1
                    elif ddp.training:
                        try:
                            caller = getframe(3)  # behind the two functions of `torch.nn.Module` that call a forward
                        except ValueError:
                            caller = getframe(1)
                        around = caller.f_back or caller
                        place = caller.f_code, caller.f_lasti, around.f_code, around.f_lasti
                        if reducer.opened_at == observer.backwards_over or reducer.unfollowed is not None:
                            training._look_at_unfollowed(ddp, reducer, place, getframe(1))
                        reducer.opened_at, reducer.place = observer.backwards_over, place
                    if forwards >= reducer.next_look:
                        looked = True
                        training._look_at_forward(ddp, reducer, sys._getframe(1))
                    newest, closer = nonfinite.newest, nonfinite.waiting or nonfinite.places
                    if closer is not None or newest is None or newest.ddp() is not ddp:
                        nonfinite.forward_begins(ddp)
                else:
                    keep((observer.course.forward_began, False, ddp.training, _now_ns()))
                    observer.moments.make_room()
                    training._evidence.forward_begins(ddp, sys._getframe(1))
            except Exception as error:
                observer.fault("forward", error, harms=("step_tracks",))
                reducer = None
            try:
                return forward(ddp, *arguments, **options)
            except BaseException as error:
                if reducer is not None:
                    reducer.opened_at = NONE_OPEN
                leave_no_frame(error)
                raise
            finally:
                try:
                    keep((phase_ended, _now_ns()))
                    if reducer is not None:
                        newest = nonfinite.newest
                        if newest is None or nonfinite.places is not None:
                            nonfinite.forward_ended()
                        else:
                            newest.until = sequence()
                    if looked and reducer is not None:
                        training._look_at_forward_end(ddp, reducer, _now_ns())
                except Exception as error:
                    observer.fault("forward", error, harms=("step_tracks",))

        ddp_class.forward = forward_timed

    def _hook_backwards(self, autograd: Any) -> None:
        backward, training, observer, passes = autograd.backward, self, self._observer, self._passes
        keep, backward_began, backward_ended = self._keep, observer.course.backward_began, self._take_in_backward
        reductions, raised, nonfinite = self._reductions, self._reductions.raised, self._nonfinite

        @functools.wraps(backward)
        def backward_timed(*arguments: Any, **options: Any) -> Any:
            watched = observer.thread == get_ident() and not observer.backwards
            if watched:
                observer.backwards += 1
                try:
                    nonfinite.backward_begins(arguments[0] if arguments else options.get("tensors", ()))
                    keep((backward_began, _now_ns()))
                    if observer.on_device:
                        training._device_begins(BACKWARD)
                except Exception as error:
                    observer.fault("backward", error, harms=("step_tracks",))
            try:
                return backward(*arguments, **options)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                if watched:
                    observer.backwards -= 1
                    observer.backwards_over += 1
                    try:
                        keep((backward_ended, passes.newest, _now_ns()))
                        newest = nonfinite.newest
                        if newest is not None and newest.streak:
                            nonfinite.backward_ended()
                        if raised:
                            reductions.backward_is_over()
                        if observer.on_device:
                            training._device_ends(BACKWARD)
                    except Exception as error:
                        observer.fault("backward", error, harms=("step_tracks",))

        autograd.backward = backward_timed

    def _hook_optimizers(self, optimizers: Any) -> None:
        training, observer, sizes, nonfinite = self, self._observer, self._sizes, self._nonfinite
        digests, is_broken = self._digests, Sample.is_broken
        keep, step_began, step_ended = self._keep, observer.watch.enter, observer.course.optimizer_stepped

        def before_step(optimizer: Any, arguments: Any, options: Any) -> None:
            if observer.thread != get_ident():
                return
            try:
                keep((step_began, OPTIMIZER, _now_ns()))
                if observer.on_device:
                    training._device_begins(OPTIMIZER)
            except Exception as error:
                observer.fault("optimizer", error, harms=("step_tracks",))

        def after_step(optimizer: Any, arguments: Any, options: Any) -> None:
            if observer.thread != get_ident():
                return
            try:
                ended_ns, identity = _now_ns(), id(optimizer)
                if observer.on_device:
                    training._device_ends(OPTIMIZER)  # before the step may be over
                if nonfinite.held or (not nonfinite.is_over and any(map(is_broken, nonfinite.samples))):
                    nonfinite.stepped(optimizer)
                if not nonfinite.is_over:  # The bits of a NaN are no one's.
                    digests.steps += 1
                    if digests.steps >= digests.next_look:
                        digests.look()
                keep((step_ended, identity, ended_ns))
                if identity not in sizes.measured:
                    sizes.stepped(optimizer)
            except Exception as error:
                observer.fault("optimizer", error, harms=("step_tracks",))

        optimizers.register_optimizer_step_pre_hook(before_step)
        optimizers.register_optimizer_step_post_hook(after_step)

    def _hook_saving(self, torch: Any) -> None:
        save, training, observer = torch.save, self, self._observer

        @functools.wraps(save)
        def save_timed(*arguments: Any, **options: Any) -> Any:
            watched = observer.thread == get_ident()
            if watched:
                observer.journal.guarded(
                    training._evidence.saves, arguments, options, sys._getframe(1), harms=("files",)
                )
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

    def _has_started_workers(self, iterator: Any) -> bool:
        """Return whether a batch is the first of its pass, and that the first of its workers."""
        if iterator._num_yielded != 1 or not iterator._num_workers:
            return False
        known = "_ddpdoctor_served" in iterator.__dict__
        iterator._ddpdoctor_served = True
        return not known

    def _fetch_failed(self, iterator: Any, source: Optional[Source], exhausted: bool) -> None:
        try:
            self._keep((self._observer.course.fetch_failed, source if exhausted else None, _now_ns()))
            self._observer.moments.make_room()
            if exhausted and source is not None:
                self._passes.pass_ended(iterator)
        except Exception as error:
            self._observer.fault("fetch", error, harms=("step_tracks",))

    def _remember(self, loader: Any, iterator: Any) -> None:
        """Link an iterator to its loader as a source of steps."""
        try:
            source = self._sources.get(loader)
            if source is None:
                source = self._sources[loader] = Source()
            iterator._ddpdoctor_source = source
        except Exception:  # an iterator of the user's own takes no attributes
            return

    def _look_at_unfollowed(self, ddp: Any, reducer: Reducer, place: tuple[Any, ...], frame: FrameType) -> None:
        """Look at a forward that is not the first since the newest backward, or the first after such ones."""
        self._observer.journal.guarded(
            self._unfollowed.look, ddp, reducer, place, frame, harms=("unfollowed_forwards",)
        )

    def _look_at_forward(self, ddp: Any, reducer: Reducer, frame: FrameType) -> None:
        """Look at a forward that records gradients: one of the first, of a loader, on a GPU, or every 16th.

        So is each whose backward is measured, and the next one, at which that is read.
        """
        observer = self._observer
        observer.moments.make_room()
        if reducer.is_measured and ddp.require_backward_grad_sync:
            self._reductions.read(ddp, reducer)
        noted = reducer.forwards <= FORWARDS_NOTED
        always = noted or reducer.on_gpu or observer.on_device
        reducer.next_look = reducer.forwards + (1 if always else ROOM_MADE_EVERY)
        if noted or observer.has_new_loader:
            self._evidence.forward_begins(ddp, frame)
        if observer.on_device:
            self._device_begins(FORWARD)
        if reducer.on_gpu and not self._reads.is_over:
            observer.journal.guarded(self._sample_reads, harms=("host_reads",))

    def _look_at_forward_end(self, ddp: Any, reducer: Reducer, now_ns: int) -> None:
        if ddp.require_backward_grad_sync and reducer.iterations >= reducer.next_measured:
            self._reductions.measure(ddp, reducer, now_ns)
        forwards_to_it = 1 if reducer.is_measured else reducer.next_measured - reducer.iterations
        reducer.next_look = min(reducer.next_look, reducer.forwards + forwards_to_it)
        if self._observer.on_device:
            self._device_ends(FORWARD)

    def _sample_reads(self) -> None:
        self._observer.moments.take_in()
        self._reads.forward_begins(self._observer.steps.current)

    def _take_in_backward(self, newest: Optional[Pass], now_ns: int) -> None:
        """Take in that a backward is over, made with the newest batch of a pass."""
        self._passes.backward_ended(newest, self._reductions.backward_ended(now_ns))

    def _device_begins(self, phase: int) -> None:
        """Begin a phase on a GPU: which step that is of must be known at once."""
        self._observer.moments.take_in()
        if self._observer.steps.device_times is not None:
            self._observer.steps.device_times.begins(phase)

    def _device_ends(self, phase: int) -> None:
        self._observer.moments.take_in()
        if self._observer.steps.device_times is not None:
            self._observer.steps.device_times.ends(phase)

    def _pause_begins(self, phase: int) -> None:
        """Begin something that belongs to no step, once the optimizer has stepped."""
        self._keep((self._observer.course.pause_began, phase, _now_ns()))

    def _pause_ended(self) -> None:
        self._keep((self._observer.watch.leave, _now_ns()))
