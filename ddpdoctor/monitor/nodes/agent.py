"""An agent: forwards what the ranks of this node wrote to the head, one update after the other, by a thread of its own.

There is never more than one update under way. The next one is made of what is known when the last one was acknowledged,
so nothing piles up here while the head is slow or gone, and a connection that comes back gets all that is still known.
"""

from __future__ import annotations

import queue
import secrets
import socket
import threading
import time
from array import array
from bisect import bisect_right

import zmq

from ddpdoctor.diagnosis.clocks import Bound, ClockBounds
from ddpdoctor.errors import RecordError
from ddpdoctor.launch.processes import without_signals
from ddpdoctor.monitor.nodes import messages
from ddpdoctor.monitor.nodes.meeting import Meeting, endpoint, reach
from ddpdoctor.monitor.nodes.messages import PROTOCOL
from ddpdoctor.record.joining import Clock
from ddpdoctor.record.model import RunRecord, shared_fields
from ddpdoctor.record.streams.collectives import CollectiveTrack
from ddpdoctor.record.writer import epoch_ns

EVERY_S = 1.0
"""Updates are so far apart, however often this node is looked at; what may prove a hang is sent at once."""
AGAIN_AFTER_S = 5.0
"""An update that was not answered for so long is sent again: it may have been lost with a connection."""
UNREACHED_AFTER_S = 15.0
_MOST_REWRITTEN = 256
_POLL_MS = 100


class Agent:
    """Starts at once; ``offer`` gives it what there is to send."""

    def __init__(self, meeting: Meeting, first_address: str = "") -> None:
        """``first_address`` is where the ranks meet, which this machine reaches for certain."""
        self._meeting = meeting
        self.asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Ranks of this node whose stacks the head wants; for whoever watches them to take."""
        self._addresses = tuple(dict.fromkeys(filter(None, (first_address, *meeting.addresses))))
        self._session = secrets.token_hex(8)
        self._offer = threading.Condition()
        self._record: RunRecord | None = None
        self._state: tuple[str, int | None, bool] = ("running", None, False)
        self._bounds = ClockBounds()
        self._newest_bound: Bound | None = None
        self.head_host = ""
        """Name of the head's machine, once it has answered."""
        self.verdict = ""
        """The head's verdict on all ranks."""
        self.answered_s = 0.0
        """When the head answered last, on the monotonic clock; 0 before."""
        self.trouble = ""
        """Why the head cannot be reached; empty while all is well."""
        self.sent_bytes = self.sent_updates = 0
        self._fields: dict[str, bytes] = {}
        self._sent_at: dict[str, int] = {}
        self._collectives: tuple[CollectiveTrack, ...] | None = None
        """As they were sent last."""
        self._steps: dict[int, tuple[int, int]] = {}
        """By rank its process, and the end of the last step that the head has."""
        self._calls: dict[int, tuple[int, int]] = {}
        self._number = 0
        self._made_s = 0.0
        """When the newest update was made, …"""
        self._made_of: tuple[object, ...] = ()
        """… and what of it is never kept waiting."""
        self._sent_state = ""
        """What the update under way says of the job."""
        self._over = threading.Event()
        self._ended_acknowledged = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpdoctor-agent", daemon=True)
        with without_signals():
            self._thread.start()

    def offer(self, record: RunRecord, *, is_quiet: bool, ended: bool, exit_code: int | None) -> None:
        """Have a record sent as soon as the head has the last one; a newer one takes its place."""
        with self._offer:
            self._record = record
            self._state = ("ended" if ended else "running", exit_code, is_quiet)
            self._offer.notify()

    def clock(self) -> Clock | None:
        """Return how this node's clock differs from the head's."""
        with self._offer:
            return self._bounds.clock()

    def finish(self, patience_s: float) -> None:
        """Wait until the head has what was offered last, if that was the end; no longer than so."""
        with self._offer:
            ended = self._state[0] == "ended"
        if ended:
            self._ended_acknowledged.wait(patience_s)

    def close(self) -> None:
        """Forward nothing more."""
        self._over.set()
        with self._offer:
            self._offer.notify()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        context = zmq.Context()
        try:
            if self._meeting.protocol != PROTOCOL:
                self._tell_version(context)
            while not self._over.is_set():
                try:
                    self._reach(context)
                except Exception as error:  # Of ours: the user is told, and all is sent again.
                    self.trouble = f"sending to it failed: {error!r}"[:500]
                    self._forget_sent()
                    self._over.wait(AGAIN_AFTER_S)
        finally:
            context.destroy(linger=0)

    def _tell_version(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Let the head know, too, that the versions differ; nothing else is said to it."""
        self.trouble = messages.differing(self._meeting.protocol, "it", "this machine")
        while not self._over.is_set():
            address, _ = reach(self._addresses, self._meeting.port)
            if address:
                own = messages.connected(
                    context, self._meeting, endpoint(address, self._meeting.port), messages.MOST_BYTES
                )
                own.sndtimeo = 1_000 * int(UNREACHED_AFTER_S)
                try:
                    own.send(messages.pack(self._farewell()))
                    if own.poll(1_000 * int(UNREACHED_AFTER_S)):
                        break
                except zmq.Again:
                    continue
                finally:
                    own.close(200)
            self._over.wait(2.0)
        self._over.wait()

    def _reach(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Try the addresses, and talk to the one that answers for as long as it does."""
        address, refused = reach(self._addresses, self._meeting.port)
        if not address:
            self.trouble = f"{refused}, at port {self._meeting.port}"
            self._over.wait(2.0)
        elif not self._talk(context, endpoint(address, self._meeting.port)):
            # Someone else listens there; or a firewall lets begin what it does not let continue.
            self.trouble = f"{address}: the port is open, but does not answer to the job's key"
            self._addresses = (*(one for one in self._addresses if one != address), address)

    def _talk(self, context: zmq.Context[zmq.Socket[bytes]], where: str) -> bool:
        """Send and receive until the stop, or until the head has never answered; return whether it ever has."""
        own = messages.connected(context, self._meeting, where, messages.MOST_BYTES)
        waiting_s = 0.0
        """Since when an update is under way; 0 when none is."""
        content, sent_ns, sends, began_s = b"", 0, 0, time.monotonic()
        reached = False
        try:
            while not self._over.is_set():
                if not waiting_s:
                    content, sends = self._next_update(), 0
                    if not content:
                        continue
                if not waiting_s or time.monotonic() - waiting_s > AGAIN_AFTER_S:
                    sent_ns = self._send(own, content)
                    sends += bool(sent_ns)
                    # Where there is no connection yet it is tried again soon.
                    waiting_s = time.monotonic() - (0 if sent_ns else AGAIN_AFTER_S - 0.3)
                if own.poll(_POLL_MS):
                    answer = self._received(own)
                    if answer is not None and answer.number == self._number:
                        # Of an update that was sent twice it is not known which one was received.
                        self._take(answer, sent_ns if sends == 1 else 0, epoch_ns())
                        waiting_s, reached = 0.0, True
                elif not reached and time.monotonic() - began_s > UNREACHED_AFTER_S:
                    return False
                if reached and waiting_s and time.monotonic() - self.answered_s > 2 * AGAIN_AFTER_S:
                    self.trouble = f"{where.removeprefix('tcp://')}: it has not answered for a while"
            if reached and self._sent_state != "ended":
                self._send(own, messages.pack(self._farewell()))
        finally:
            own.close(200)
        return True

    def _send(self, own: zmq.Socket[bytes], content: bytes) -> int:
        """Send an update where there is a connection; when that was."""
        sent_ns = epoch_ns()
        try:
            own.send(content, zmq.NOBLOCK)
            self.sent_bytes, self.sent_updates = self.sent_bytes + len(content), self.sent_updates + 1
        except zmq.Again:
            return 0
        return sent_ns

    def _received(self, own: zmq.Socket[bytes]) -> messages.Answer | None:
        try:
            return messages.unpack_answer(own.recv(zmq.NOBLOCK))
        except (zmq.ZMQError, RecordError):
            return None

    def _take(self, answer: messages.Answer, sent_ns: int, now_ns: int) -> None:
        self.answered_s, self.head_host, self.trouble = time.monotonic(), answer.host, ""
        if answer.refused:
            self.trouble = answer.refused
            self._over.wait(AGAIN_AFTER_S)
            return
        self.verdict = answer.verdict
        if sent_ns and answer.received_at_ns:
            # It was received after it was sent, and the answer after that was sent.
            bound = Bound(now_ns, answer.sent_at_ns - now_ns, answer.received_at_ns - sent_ns)
            with self._offer:
                self._bounds.add(bound)
                self._newest_bound = bound
        for rank in answer.asks:
            self.asked.put(rank)
        if answer.send_all:
            self._forget_sent()
        elif self._sent_state == "ended":
            self._ended_acknowledged.set()

    def _forget_sent(self) -> None:
        """Send everything with the next update."""
        self._number = 0
        self._fields.clear()
        self._sent_at.clear()
        self._steps.clear()
        self._calls.clear()
        self._collectives = None

    def _next_update(self) -> bytes:
        """Return the next update, once something was offered; empty where nothing was for a while."""
        with self._offer:
            if not self._is_due() and not self._over.is_set():
                self._offer.wait(0.2)
            if not self._is_due():
                return b""
            record, self._record = self._record, None
            assert record is not None
            state, exit_code, is_quiet = self._state
            self._made_s, self._made_of = time.monotonic(), _picture(record, self._state)
            bound, self._newest_bound = self._newest_bound, None
        self._number += 1
        self._sent_state = state
        fields = self._changed(record, everything=state == "ended")
        collectives = None
        if self._collectives != record.collectives:
            self._collectives = record.collectives
            collectives = tuple(messages.pack_rows(track, anew=True) for track in record.collectives)
        pids = {rank.rank: rank.pid for rank in record.ranks}
        update = messages.Update(
            protocol=PROTOCOL,
            session=self._session,
            number=self._number,
            host=socket.gethostname()[:255],
            sent_at_ns=epoch_ns(),
            state="ended" if state == "ended" else "running",
            exit_code=exit_code,
            is_quiet=is_quiet,
            clock=None if bound is None else (bound.at_ns, bound.low_ns, bound.high_ns),
            job=messages.JobFacts(**shared_fields(record.job, messages.JobFacts)),
            fields=fields,
            steps=_news(record.step_tracks, "ended_at_ns", pids, self._steps),
            calls=_news(record.call_tracks, "entered_at_ns", pids, self._calls),
            collectives=collectives,
        )
        return messages.pack(update)

    def _is_due(self) -> bool:
        """Return whether something was offered that is to be sent now."""
        if self._record is None:
            return False
        waited = time.monotonic() - self._made_s >= EVERY_S
        return waited or self._over.is_set() or _picture(self._record, self._state) != self._made_of

    def _farewell(self) -> messages.Update:
        """Send that no more will come of ranks that continue."""
        return messages.Update(
            protocol=PROTOCOL,
            session=self._session,
            number=self._number + 1,
            host=socket.gethostname()[:255],
            sent_at_ns=epoch_ns(),
            state="left",
        )

    def _changed(self, record: RunRecord, *, everything: bool) -> dict[str, bytes]:
        changed = {}
        for name in messages.SENT:
            if not everything and self._number - self._sent_at.get(name, -1_000) < messages.SELDOM.get(name, 0):
                continue
            content = messages.pack_field(record, name)
            if self._fields.get(name) != content:
                self._fields[name] = changed[name] = content
                self._sent_at[name] = self._number
        return changed


def _picture(record: RunRecord, state: tuple[str, int | None, bool]) -> tuple[object, ...]:
    """Return what proves a hang, and the end: whether ranks stand, wait or are gone, and what their recorders tell."""
    return state, record.ranks, [len(track) for track in record.collectives]


def _news(
    tracks: tuple[messages.Track, ...], time: str, pids: dict[int, int], sent: dict[int, tuple[int, int]]
) -> tuple[messages.Rows, ...]:
    """Return the rows of each track that the head does not have, and those that have changed since."""
    news = []
    for track in tracks:
        times: array[int] = getattr(track, time)
        pid = pids.get(track.rank, 0)
        known = sent.get(track.rank)
        anew = known is None or known[0] != pid
        start = 0 if known is None or anew else bisect_right(times, known[1])
        left: array[int] | None = getattr(track, "left_at_ns", None)
        if start == len(track) and not anew:
            continue
        news.append(messages.pack_rows(track, start, anew=anew))
        last_ns = times[-1] if len(track) else 0
        if left is not None:
            # What has not ended yet is sent again.
            oldest = max(0, len(track) - _MOST_REWRITTEN)
            open_at = next((at for at in range(oldest, len(track)) if not left[at]), None)
            last_ns = last_ns if open_at is None else times[open_at] - 1
        sent[track.rank] = pid, last_ns
    return tuple(news)
