"""The parts of a live run inside a process of the job, put together."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from resource import RUSAGE_SELF, getrusage
from threading import get_ident
from types import ModuleType
from typing import Any, Optional

from ...record import layout
from ..environment import Settings, recorded_environment
from ..free_port import network_interfaces
from ..groups import GroupBook, Groups
from ..journal import Journal
from ..nonfinite import NonFinite
from ..process import ProcessEnd
from ..torch_compat import SHARDED_STATES, Capabilities, after_import
from . import clocks
from .collectives import Calls
from .ddp_events import Evidence, Searches
from .flight_recorder import Flights
from .heartbeat import Gauges, HeartbeatThread
from .hooks import Training
from .loaders import Passes
from .observer import Observer
from .reductions import Reductions, ReplicaDigests


class Live:
    """The hooks of one process, which live as long as it."""

    def __init__(self, journal: Journal, process_end: ProcessEnd) -> None:
        self._journal = journal
        self._process_end = process_end
        self.observer = Observer(journal)
        self._heartbeat: Optional[HeartbeatThread] = None
        self._groups: Optional[GroupBook] = None
        self._flights: Optional[Flights] = None
        self._waits: Optional[Groups] = None
        self._training: Optional[Training] = None
        self._meeting: Optional[NodeMeeting] = None
        self._began = False
        """There was a world."""
        self._settings = Settings(journal, lambda: self.observer.step_ring is not None)

    def before_torch(self) -> None:
        """Hook what must be in place before the user's first line."""
        self._settings.listen()

    def after_torch(self, torch: Any) -> None:
        """Install the hooks once torch is there; they do nothing before there is a world."""
        if not torch.distributed.is_available():
            return
        journal, observer = self._journal, self.observer
        capabilities = Capabilities(torch)
        for name, cost in capabilities.missing.items():
            journal.event("missing_capability", name=name, cost=cost)
        self._groups = GroupBook(journal, torch)
        passes = Passes(observer, torch, capabilities)
        passes.install()
        evidence = Evidence(observer, torch, passes)
        evidence.install()
        gauges = Gauges(journal)
        _watch_cores(gauges)
        self._flights = flights = Flights(torch, journal, self._groups, capabilities)
        self._meeting = NodeMeeting(journal, torch)
        self._heartbeat = HeartbeatThread(observer, flights, gauges, passes.note_progress, self._meeting.look)
        observer.adopted = self._heartbeat.start
        searches = Searches(journal, evidence.wrap_number)
        reductions = Reductions(observer, torch, capabilities, evidence.wrap_number, searches)
        reductions.install()
        observer.look_soon = reductions.look_soon
        nonfinite = NonFinite(journal, torch, evidence.wrap_number, passes.newest_batch, observer.current_step)
        nonfinite.install()
        digests = ReplicaDigests(journal, torch, evidence.wrap_number, reductions.followed)
        self._training = Training(observer, torch, capabilities, reductions, evidence, passes, nonfinite, digests)
        self._training.install()
        ShardedForwards(observer, torch, capabilities.is_compiling).install()
        Calls(observer, torch, capabilities, self._groups).install()
        self._waits = Groups(
            journal, torch, self._groups, self.world_made, self._meeting.end, self._heartbeat.let_frames_go
        )
        self._waits.install()
        self._process_end.before_counting = observer.moments.take_in
        self._process_end.trains_here = observer.is_training_thread
        self._process_end.after_report = self._process_end.before_os_exit = self._close
        os.register_at_fork(after_in_child=observer.become_forked_child)
        os.register_at_fork(after_in_child=self._heartbeat.become_forked_child)
        # It is held, and written if the child becomes a rank: its hooks are those of its parent.
        os.register_at_fork(after_in_child=lambda: journal.event("torch", version=str(torch.__version__)))
        if journal.rank is not None:
            # A rank that its launcher has named: it may stand before there is a world.
            observer.open_rings()
            if observer.step_ring is not None:
                self._heartbeat.start(threading.main_thread().ident or 0)

    def meet_world(self, torch: Any) -> None:
        """Measure from now on, if this process is a rank already."""
        distributed = torch.distributed
        if not distributed.is_available() or not distributed.is_initialized() or self._waits is None:
            return
        if not self._began:
            self._waits.note_world()
        else:
            self.observer.start()
            if self._heartbeat is not None:
                self._heartbeat.resume()

    def stop(self) -> None:
        """Measure no longer, and write what is there."""
        if self.observer.step_ring is not None and self._heartbeat is not None and self._training is not None:
            self._training.close()
            self.observer.finish()
            self.observer.stop()
            self._heartbeat.last_beat()

    def world_made(self, rank: int, world_size: int) -> None:
        """Measure this process, which is a rank now."""
        self._journal.rank = rank
        self._process_end.belongs_here()
        self._journal.release()
        if self._groups is not None:
            self._groups.note_world()
        if self._flights is not None:
            self._journal.guarded(self._flights.note_world, harms=("call_tracks",))
        if self._meeting is not None:
            self._journal.guarded(self._meeting.begin, rank, world_size, harms=())
        if not self._began:
            self._began = True
            self.observer.start()
            if self._heartbeat is not None and self.observer.step_ring is not None:
                self._heartbeat.start(self.observer.thread)
            self._journal.guarded(self._settings.note_others, harms=("settings",))
        elif self.observer.is_training_thread():
            self.observer.finish()  # A step does not reach from one world into the next.

    def _close(self) -> None:
        """Write what is still open, as the process is about to end; what takes longest last."""
        if self._meeting is not None:
            self._meeting.end()
        if self.observer.step_ring is not None and self._heartbeat is not None and self._training is not None:
            self._training.close()
            self.observer.finish()
            self._heartbeat.beat_now()
            self._heartbeat.last_beat()


# The meeting of the monitors of several nodes: they exchange one address through the job's own store.
#
# The monitor beside rank 0 writes where it is to a file of its run directory; rank 0 puts that into the store, under
# one key. A monitor whose ranks lack rank 0 names one of them in a file, and that rank takes it out and passes it to
# its monitor. What it holds is the monitors' business.
#
# Where no monitor has written such a file, which none does on the only node of a job, the store is left alone. Else a
# thread of its own uses it for one call that returns at once, by a connection of its own where torch can make one, and
# keeps no reference to it in between: a store that lives on keeps its port, and a new process group there would read
# the keys of the old one. It ends before the world does.

KEY = "ddpdoctor/head"
LOOK_EVERY_S = 0.5
"""How often the files of the monitor of this node are looked for."""
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 10.0
"""Between two looks into the store."""
PATIENCE_S = 1.0
"""The end of a world waits no longer for a call to its store, which takes a millisecond."""


class NodeMeeting:
    """The part of one rank in it; each world begins it anew."""

    def __init__(self, journal: Journal, torch: Any) -> None:
        self._journal = journal
        self._torch = torch
        self._rank: Optional[int] = None
        """In the world that still has to be met; None where there is none."""
        self._over = threading.Event()
        """Of the world that is there now."""
        self._thread: Optional[threading.Thread] = None
        self._looks_at_s = 0.0
        self._seen: Optional[tuple[str, int, int]] = None
        """Which of the files was read last, and its identity."""
        self._read = ""
        """What was in it."""

    def begin(self, rank: int, world_size: int) -> None:
        """Write which machine this is; where there are others, their monitors are met once ours requests it."""
        self._journal.event(
            "host",
            name=os.uname().nodename,
            interfaces=network_interfaces(),
            environment=recorded_environment(os.environ),
            cores=sorted(os.sched_getaffinity(0)),
        )
        self.end()
        self._over = threading.Event()
        self._rank = rank if world_size > 1 else None

    def look(self) -> None:
        """Look, again and again, whether the monitor of this node has something for the others, or waits for something.

        From then on a thread deals with the store.
        """
        rank, over, now_s = self._rank, self._over, time.monotonic()
        if rank is None or now_s < self._looks_at_s:
            return
        self._looks_at_s = now_s + LOOK_EVERY_S
        message = self._written(layout.HEAD_FILE if rank == 0 else layout.SEEK_FILE)
        if not message or (rank != 0 and message != str(rank)):
            return
        self._rank = None
        self._thread = threading.Thread(
            target=self._meet, args=(message if rank == 0 else "", over), name="ddpdoctor-nodes", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Stop before the world, or the process, ends: nothing of ours holds its store, nor runs, from here on."""
        self._rank = None
        self._over.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(PATIENCE_S)

    def _meet(self, message: str, over: threading.Event) -> None:
        pause_s = FIRST_PAUSE_S
        try:
            while not over.is_set() and not self._exchanged(message):
                over.wait(pause_s)
                pause_s = min(LONGEST_PAUSE_S, pause_s * 1.5)
        except Exception:  # The store of a job that ends goes away; nothing is lost but the meeting.
            return

    def _exchanged(self, message: str) -> bool:
        """Put the message for the others into the store, or take theirs out; return whether it is done."""
        store = self._store()
        if message:
            store.set(KEY, message)
            return True
        if not store.check([KEY]):
            return False
        found = bytes(store.get(KEY))[: layout.MOST_HEAD_BYTES].decode("ascii", "replace")
        self._journal.event("head", told=found)
        return True

    def _store(self) -> Any:
        """Return the job's store, by a connection of our own where there can be one."""
        store = self._torch.distributed.distributed_c10d._get_default_store()
        try:
            return store.clone()
        except (AttributeError, NotImplementedError, RuntimeError):
            return store

    def _written(self, name: str) -> str:
        """Return what the monitor of this node has written to a file; empty while there is none.

        It is read once: a rank that reads again and again is taken for one that works, and so never stands still.
        """
        path = os.path.join(self._journal.run_directory, name)
        try:
            status = os.stat(path)
            seen = (name, status.st_ino, status.st_mtime_ns)
            if seen != self._seen:
                with open(path, encoding="ascii") as file:
                    self._read = file.read(layout.MOST_HEAD_BYTES).strip()
                self._seen = seen
            return self._read
        except (OSError, ValueError):
            return ""


# The forwards of sharded modules, as phases of a step, and that their collectives count in backward, too.

_now_ns = time.monotonic_ns


class ShardedForwards:
    """Replacements of what ``fully_shard`` runs before and after the forward of a module."""

    def __init__(self, observer: Observer, torch: Any, is_compiling: Callable[[], bool]) -> None:
        self._observer = observer
        self._is_compiling = is_compiling
        self._is_recording: Callable[[], bool] = torch.is_grad_enabled

    def install(self) -> None:
        """Hook the class once torch's module is imported, which few scripts do."""
        for name in SHARDED_STATES:
            after_import(name, self._hook)

    def _hook(self, module: ModuleType) -> None:
        state_class = getattr(module, "FSDPState", None)
        if state_class is None or not hasattr(state_class, "_root_pre_forward"):
            return
        enter, leave = state_class._pre_forward, state_class._post_forward
        observer, is_recording = self._observer, self._is_recording
        keep, began, ended = observer.moments.keep, observer.course.forward_began, observer.watch.leave

        @functools.wraps(enter)
        def _pre_forward(state: Any, *arguments: Any, **options: Any) -> Any:
            try:
                # Only of the outermost module: those inside of it are a part of its forward.
                if self._is_watched() and state._state_ctx.iter_forward_root is None:
                    observer.shards = True
                    keep((began, is_recording(), state._modules[0].training, _now_ns()))
                    observer.moments.make_room()
            except Exception as error:
                observer.fault("forward", error, harms=("step_tracks",))
            return enter(state, *arguments, **options)

        @functools.wraps(leave)
        def _post_forward(state: Any, *arguments: Any, **options: Any) -> Any:
            is_root = False
            try:
                is_root = self._is_watched() and state._state_ctx.iter_forward_root is state
            except Exception as error:
                observer.fault("forward", error, harms=("step_tracks",))
            result = leave(state, *arguments, **options)
            if is_root:
                keep((ended, _now_ns()))
            return result

        state_class._pre_forward, state_class._post_forward = _pre_forward, _post_forward

    def _is_watched(self) -> bool:
        observer = self._observer
        return observer.thread == get_ident() and not observer.backwards and not self._is_compiling()


def _watch_cores(gauges: Gauges) -> None:
    """Add up what a rank gets of its cores, and what it loses on them beside its own work."""
    gauges.add(layout.CORE_TIME, "ns", time.process_time_ns)
    gauges.add(layout.CORE_WAIT, "ns", _core_wait_ns)
    gauges.add(layout.KERNEL_TIME, "ns", lambda: int(getrusage(RUSAGE_SELF).ru_stime * 1e9))
    gauges.add(layout.PAGE_FAULTS, "count", lambda: getrusage(RUSAGE_SELF).ru_minflt)


def _core_wait_ns() -> int:
    try:
        return int(clocks.read_kernel("/proc/self/schedstat").split()[1])
    except (OSError, ValueError, IndexError):
        return 0  # A kernel without it.
