"""What a monitor does where the job has ranks on other nodes: it is the head, or an agent of one.

The monitor that has rank 0 is the head. It sees its own ranks by itself and the others by what their agents send, and
joins the records, so that all that is concluded of a run is concluded of all its ranks. A node of which nothing is
heard any more leaves the joined record: what is not seen is not judged.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ddpdoctor.diagnosis.clocks import bounds_of_steps
from ddpdoctor.diagnosis.performance.summary import RunVerdict
from ddpdoctor.diagnosis.wording import rank_list
from ddpdoctor.errors import ConfigurationError, UsageError
from ddpdoctor.monitor.snapshot import Snapshot
from ddpdoctor.record import layout
from ddpdoctor.record.assembly.ranks import RankBook
from ddpdoctor.record.joining import Clock, Joiner, NodePart
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.writer import epoch_ns

if TYPE_CHECKING:
    from ddpdoctor.monitor.nodes.agent import Agent
    from ddpdoctor.monitor.nodes.attached import HeldNode
    from ddpdoctor.monitor.nodes.head import Head

FRESH_NS = 3_000_000_000
"""A standstill is believed where every node has reported within so long."""
SETTLED_AFTER_NS = 1_500_000_000
"""After the world was made all ranks of this node have said so."""
LAST_MESSAGE_S = 10.0
"""For so long the head waits for the ends of the others when its own job is over; an agent waits a third of it."""
CLOCK_KEPT_EVERY_NS = 10_000_000_000
FIRST_NARROWED_NS = 1_000_000_000
NARROWED_EVERY_NS = 10_000_000_000
"""A clock is narrowed after a second, then after twice that, and so on up to this: it takes 10 ms a node."""
UNHEARD_AFTER_NS = 15_000_000_000
"""Nodes that no one watches are reported of as such after so long."""
RETRIED_AFTER_NS = 5_000_000_000
DOUBTED_AFTER_NS = 5_000_000_000
"""A job that is started again has a size and ranks that not every monitor knows at the same moment."""
FEW_LOST = 3
"""Lost nodes that are reported of one by one."""
_MOST_UNUSABLE = 16
_ALL_ADDRESSES = ("0.0.0.0", "::")
_SAME_CLOCK_NS = 200_000
"""Clocks that differ less are left as they were, so that nothing has to be moved anew."""


class Nodes:
    """The other nodes of one watched job; costs nothing where there are none."""

    def __init__(
        self, directory: Path, ask_for_stacks: Callable[[int], None], head_at: tuple[str, int] | None = None
    ) -> None:
        """``head_at`` is where the head listens, where the user says it; ``ask_for_stacks`` asks a rank of ours."""
        self._directory = directory
        self._ask_for_stacks = ask_for_stacks
        # Where it is to listen on all addresses, agents find it as they do without being told.
        self._head_at = ("", head_at[1]) if head_at is not None and head_at[0] in _ALL_ADDRESSES else head_at
        self._head: Head | None = None
        self._agent: Agent | None = None
        self._joiner = Joiner()
        self.recorded: tuple[NodePart, ...] = ()
        """What other nodes have recorded of a job that is over."""
        self._clocks: dict[str, Clock] = {}
        self._several_since_ns = 0
        self._led_since_ns = 0
        self._clock_kept_ns = 0
        self._unusable: list[str] = []
        """Whose data made a look fail, in sentences."""
        self._fault = ""
        """Why there is no head here, or none that the others are reported of, …"""
        self._retried_at_ns = 0
        """… and when that is tried again: a port that was taken may be free by then."""
        self._known_head = ""
        self._world: frozenset[int] = frozenset()
        """The processes that are ranks here."""
        self._is_announced = False
        """The address of the head is announced to the other nodes."""
        self._seeks = -1
        """The rank that was named to find the head."""
        self._shown_verdict: tuple[str, ...] = ()
        """What was sent to the other nodes of the verdict, without its figures."""
        self._was_lost: dict[str, int] = {}
        """For how many seconds lost nodes had been silent when that was noticed."""
        self._narrowed: dict[str, tuple[int, int]] = {}
        """When each node's clock is to be narrowed again, and the pause that comes after that."""
        self._epoch: tuple[tuple[str, int], ...] = ()
        self._place = -1
        """Descriptor of the locked file that makes this monitor the one of its node that talks to others."""
        self._is_second = False
        """Another monitor of this node does that."""
        self._is_over = False

    @property
    def are_quiet(self) -> bool:
        """Some rank of another node has made no step for a while, as that node says."""
        if self._head is None:
            return False
        with self._head.lock:
            now_ns = epoch_ns()
            return any(node.is_quiet and not node.is_silent(now_ns) for node in self._head.nodes.values())

    @property
    def epoch(self) -> tuple[tuple[str, int], ...]:
        """Of what was joined last; another one where some of it does not join on to what was joined before."""
        return self._epoch

    @property
    def tells_elsewhere(self) -> bool:
        """A head knows of this node's ranks."""
        return self._agent is not None and bool(self._agent.answered_s) and not self._agent.trouble

    @property
    def may_yet_come(self) -> bool:
        """Other nodes had no time yet to report themselves."""
        since_ns = self._led_since_ns or self._several_since_ns
        return not self._fault and not self._is_over and since_ns > 0 and epoch_ns() - since_ns < UNHEARD_AFTER_NS

    @property
    def is_head(self) -> bool:
        """The ranks of other nodes are reported here."""
        return self._head is not None and self._several_since_ns > 0

    def have_reported(self, since_ns: int, now_ns: int) -> bool:
        """Return whether every joined node has reported just now, and of a moment after ``since_ns``."""
        if self._head is None:
            return True
        with self._head.lock:
            return all(
                (now_ns - node.received_ns < FRESH_NS and node.reported_ns() > since_ns) or node.is_silent(now_ns)
                for node in self._head.nodes.values()
            )

    def look(self, book: RankBook, master: str, now_ns: int) -> None:
        """Become the head, or an agent, once it is known that there are ranks elsewhere; anew for each world."""
        if self._agent is not None:
            while not self._agent.asked.empty():
                self._ask_for_stacks(self._agent.asked.get())
        ranks = {pid: entry.rank for pid, entry in book.processes.items() if entry.rank is not None}
        if not ranks or not book.worlds:
            return
        if ranks.keys() != self._world:
            self._begin_world(frozenset(ranks))
        if self._fault and now_ns < self._retried_at_ns:
            return
        own, world_size = set(ranks.values()), max(size for size, _ in book.worlds.values())
        several = len(own) < world_size
        self._several_since_ns = (self._several_since_ns or now_ns) if several else 0
        is_settled = several and now_ns - self._several_since_ns >= SETTLED_AFTER_NS
        if 0 in own:
            if self._agent is not None:  # Nothing is forwarded any more: rank 0 is here.
                self._agent.close()
                self._agent, self._known_head = None, ""
            if is_settled or self._head_at is not None:
                self._lead(is_settled, now_ns)
            if self._head is not None:
                self._head.forget_gone(own, world_size, now_ns)
        elif book.head and book.head != self._known_head and self._takes_place():
            self._resign()
            self._follow(book.head, master)
        elif is_settled and self._takes_place():
            self._resign()
            self._seek(min(own))

    def _begin_world(self, processes: frozenset[int]) -> None:
        """The job, or its part on this node, was started (again), perhaps with other ranks and another head."""
        self._world = processes
        self._several_since_ns, self._seeks, self._fault = 0, -1, ""
        if self._head is not None:
            self._led_since_ns = epoch_ns()

    def _resign(self) -> None:
        """Be no head any more: rank 0 is elsewhere since the job was started again."""
        if self._head is not None:
            self._head.close()
            self._head, self._led_since_ns, self._is_announced = None, 0, False
            for kept in (self._clocks, self._narrowed, self._was_lost):
                kept.clear()

    def show(self, snapshot: Snapshot) -> None:
        """Have it shown to those who look on from elsewhere."""
        if self._head is not None:
            self._head.screens.offer(snapshot)

    def joined(self, own: RunRecord, window_ns: int, now_ns: int) -> RunRecord:
        """Return what is known of all ranks, by this node's clock; ``window_ns`` is how far back steps reach, 0 for
        all.
        """
        if self.recorded:
            return self._joiner.join([NodePart(name="", record=own, clock=Clock(error_ns=0)), *self.recorded])
        if self._head is None:
            return own
        newest_ns = max((track.ended_at_ns[-1] for track in own.step_tracks if len(track)), default=0)
        since_ns = newest_ns - window_ns if window_ns and newest_ns else 0
        parts = [NodePart(name="", record=own, clock=Clock(error_ns=0))]
        epoch, quiet = [], self.are_quiet
        with self._head.lock:
            held = dict(self._head.nodes)
        for session, node in held.items():
            with self._head.lock:
                clock = self._clocks.get(session) or node.clock() or (Clock() if node.state == "ended" else None)
                if clock is None or node.is_lost(now_ns) or not node.ranks:
                    continue
                part = node.part(clock, since_ns)
                epoch.append((session, node.epoch))
            # While no step comes there is nothing to compare the clocks by, and it may have to be reported soon why.
            parts.append(part if quiet and session in self._clocks else self._narrowed_part(part, node, own, now_ns))
        self._epoch = tuple(sorted(epoch))
        for kept in (self._clocks, self._narrowed, self._was_lost):
            for gone in kept.keys() - held.keys():
                del kept[gone]
        return self._joiner.join(parts) if len(parts) > 1 else own

    def leave_out_one(self, error: Exception) -> bool:
        """Take the node that joined last from what is joined, for a look has failed; False where there is none."""
        if self._head is None:
            return False
        with self._head.lock:
            if not self._head.nodes:
                return False
            session, node = self._head.nodes.popitem()
            self._head.unusable.add(session)
        if len(self._unusable) < _MOST_UNUSABLE:
            self._unusable.append(
                f"what {node.host} reports cannot be used ({type(error).__name__}): its ranks are left out"
            )
        self._joiner = Joiner()
        return True

    def offer(self, record: RunRecord, *, is_quiet: bool, ended: bool, exit_code: int | None, now_ns: int) -> None:
        """Forward what is known of this node's ranks, where there is a head."""
        if self._agent is None:
            return
        self._agent.offer(record, is_quiet=is_quiet, ended=ended, exit_code=exit_code)
        if ended or now_ns - self._clock_kept_ns >= CLOCK_KEPT_EVERY_NS:
            self._clock_kept_ns = now_ns
            clock = self._agent.clock()
            if clock is not None:
                from ddpdoctor.monitor.nodes.meeting import write_private

                with suppress(OSError):
                    write_private(self._directory / layout.CLOCK_FILE, msgspec.json.encode(clock))

    def tell(self, verdict: RunVerdict) -> None:
        """Let the other nodes know the verdict on all ranks, once it is one, and whenever it is another."""
        if self._head is None or (verdict.state == "unknown" and not self._shown_verdict):
            return
        said = (verdict.state, verdict.code, verdict.text.partition(" waiting for ")[0] if verdict.code else "")
        if said != self._shown_verdict:
            self._shown_verdict = said
            self._head.verdict = f"{verdict.state.upper()}: {verdict.text}"[:2000]

    def ask_for_stacks(self, rank: int) -> None:
        """Have a rank of another node write its stacks."""
        if self._head is not None:
            self._head.ask_for_stacks(rank)

    def await_ends(self) -> None:
        """Wait a little for the reports of the other nodes on their ends."""
        self._is_over = True
        until_s = time.monotonic() + LAST_MESSAGE_S
        while self._head is not None and time.monotonic() < until_s:
            with self._head.lock:
                now_ns = epoch_ns()
                if all(node.state == "ended" or node.is_lost(now_ns) for node in self._head.nodes.values()):
                    return
            time.sleep(0.1)

    def finish(self) -> None:
        """Wait until the head has the end of this node."""
        if self._agent is not None and self._agent.answered_s:
            self._agent.finish(LAST_MESSAGE_S / 3)

    def notes(self, now_ns: int) -> tuple[str, ...]:
        """Return what the user has to know of the other nodes, in sentences."""
        if self._head is not None:
            return self._notes_of_head(now_ns)
        if self._agent is not None:
            return self._notes_of_agent(self._agent)
        if self._is_second:
            return (
                "another monitor on this machine watches this run, and only that one receives from the other nodes",
            )
        if self._fault:
            return (self._fault,)
        if self._seeks >= 0 and 0 < self._several_since_ns < now_ns - UNHEARD_AFTER_NS:
            return (
                "the node of rank 0 has not announced its monitor's address yet: it runs without ddpdoctor, or its "
                "monitor cannot listen and prints why; this node keeps its own record",
            )
        return ()

    def close(self) -> None:
        """Let go of the network."""
        if self._head is not None:
            self._head.close()
        if self._agent is not None:
            self._agent.close()
        if self._place >= 0:
            os.close(self._place)
            self._place = -1

    def _takes_place(self) -> bool:
        """Be the monitor of this node that talks to others, unless one is that already; when it ends another may be."""
        if self._place >= 0:
            return True
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            place = os.open(self._directory / layout.PLACE_FILE, flags, 0o600)
        except OSError:  # Another user's run, or a full disk: what is tried next says so.
            return True
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(place)
            self._is_second = True
            return False
        except OSError:
            pass  # A file system without locks.
        self._place, self._is_second = place, False
        return True

    def _seek(self, rank: int) -> None:
        from ddpdoctor.monitor.nodes.meeting import write_private

        if self._seeks == rank:
            return
        self._seeks = rank
        with suppress(OSError):  # Another user's run, or a full disk: the notes say which ranks are not seen.
            write_private(self._directory / layout.SEEK_FILE, f"{rank}\n".encode("ascii"))

    def _lead(self, is_settled: bool, now_ns: int) -> None:
        """Listen; once it is sure that there are other nodes, let them know where."""
        from ddpdoctor.monitor.nodes.head import Head
        from ddpdoctor.monitor.nodes.meeting import kept_keys, write_attach_file, write_private

        if not self._takes_place():
            return
        host, port = self._head_at or ("", 0)
        try:
            if self._head is None:
                self._head = Head(host, port, kept_keys(self._directory))
                self._led_since_ns = epoch_ns()
                write_private(self._directory / layout.HEAD_KEY_FILE, msgspec.json.encode(self._head.keys))
                write_attach_file(self._directory, self._head.keys.screens)
            if is_settled and not self._is_announced:
                announced = self._head.meeting.text().encode("ascii") + b"\n"
                write_private(self._directory / layout.HEAD_FILE, announced)
                self._is_announced = True
            self._fault = ""
        except (UsageError, ConfigurationError, OSError, ImportError) as error:
            said = error.message if isinstance(error, (UsageError, ConfigurationError)) else str(error)
            self._fault = f"the other nodes cannot send their data: {said}; each keeps its own record"
            self._retried_at_ns = now_ns + RETRIED_AFTER_NS

    def _follow(self, told: str, master: str) -> None:
        from ddpdoctor.monitor.nodes.agent import Agent
        from ddpdoctor.monitor.nodes.meeting import read_meeting

        self._known_head = told
        meeting = read_meeting(told)
        if meeting is None:
            self._fault = "the announcement of the node of rank 0 cannot be read; this node keeps its own record"
            self._retried_at_ns = sys.maxsize
            return
        if self._agent is not None:
            self._agent.close()
        if self._head_at is not None and self._head_at[0]:
            master, meeting = "", msgspec.structs.replace(meeting, addresses=(self._head_at[0],))
        self._agent = Agent(meeting, master)

    def _narrowed_part(self, part: NodePart, node: HeldNode, own: RunRecord, now_ns: int) -> NodePart:
        """Return a node's part by a clock that is narrowed now and then; the same one while it is nearly so."""
        due_ns, pause_ns = self._narrowed.get(part.name, (0, FIRST_NARROWED_NS))
        if now_ns < due_ns:
            return part
        self._narrowed[part.name] = now_ns + pause_ns, min(NARROWED_EVERY_NS, 2 * pause_ns)
        steps = tuple(bounds_of_steps(own, part.record)) if own.step_tracks else ()
        assert self._head is not None
        with self._head.lock:
            found = node.clock(steps)
        if found is None:
            return part
        known = self._clocks.get(part.name)
        if known is not None and known.error_ns is not None and found.error_ns is not None:
            apart_ns = abs(known.moved(found.at_ns) - found.moved(found.at_ns))
            if apart_ns < _SAME_CLOCK_NS and found.error_ns > known.error_ns // 2:
                return part
        self._clocks[part.name] = found
        return msgspec.structs.replace(part, clock=found)

    def _notes_of_head(self, now_ns: int) -> tuple[str, ...]:
        assert self._head is not None
        head = self._head
        told = (self._fault, head.listens, head.others, head.screens.others, head.trouble, head.front.trouble)
        notes = [note for note in (*told, *self._unusable) if note]
        notes += [
            f"messages from {source or 'another machine'} that have the job's key {why}: they are ignored"
            for source, (why, since_ns, until_ns) in tuple(self._head.lies.items())
            if until_ns - since_ns > DOUBTED_AFTER_NS
        ]
        if self._is_announced and not self._head.was_reached and 0 < self._led_since_ns < now_ns - UNHEARD_AFTER_NS:
            notes.append(
                f"no monitor of another node has connected to port {self._head.meeting.port} of this machine yet: the "
                "other nodes run without ddpdoctor, or a firewall or a wrong host name blocks them, which their own "
                "output shows"
            )
        with self._head.lock:
            lost = [node for node in self._head.nodes.values() if node.is_lost(now_ns)]
            for session in self._was_lost.keys() - {node.session for node in lost}:
                del self._was_lost[session]
            for node in lost:
                self._was_lost.setdefault(node.session, (now_ns - node.received_ns) // 1_000_000_000)
        if not lost:
            return tuple(notes)
        if len(lost) <= FEW_LOST:
            notes += [
                f"no message from {node.host} ({rank_list(node.ranks)}) for {self._was_lost[node.session]} s: its "
                "monitor, link or machine is down; nothing is concluded about its ranks until it is back"
                for node in lost
            ]
        else:
            named = ", ".join(node.host for node in lost[:FEW_LOST])
            ranks = sorted({rank for node in lost for rank in node.ranks})
            notes.append(
                f"no message from {len(lost)} nodes ({named} and {len(lost) - FEW_LOST} more, with {len(ranks)} "
                "ranks) for a while: their monitors, links or machines are down, or this one cannot keep up; nothing "
                "is concluded about their ranks until they are back"
            )
        return tuple(notes)

    def _notes_of_agent(self, agent: Agent) -> tuple[str, ...]:
        if agent.trouble:
            head = agent.head_host or "the monitor on the node of rank 0"
            return (
                f"{head} cannot receive this node's ranks ({agent.trouble}); this node's record is complete, and "
                "`ddpdoctor report RUN RUN` joins the records of several nodes",
            )
        if not agent.answered_s:
            return ()
        where = f"the verdict on all ranks is on {agent.head_host}, where rank 0 runs"
        return (where, f"verdict of {agent.head_host}: {agent.verdict}") if agent.verdict else (where,)
