"""The parts of a live run inside a process of the job, put together."""

from __future__ import annotations

import os
import threading
from typing import Any, Optional

from ..environment import Settings
from ..groups import GroupBook, Groups
from ..journal import Journal
from ..nonfinite import NonFinite
from ..process import ProcessEnd
from ..torch_compat import Capabilities
from .collectives import Calls
from .ddp_events import Evidence, Searches
from .flight_recorder import Flights
from .gauges import Gauges
from .heartbeat import HeartbeatThread
from .hooks import Training
from .loaders import Passes
from .node_meeting import NodeMeeting
from .observer import Observer
from .reductions import Reductions
from .replica_digests import ReplicaDigests


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
