"""The head: takes in what the agents of the other nodes send, by a thread of its own, and answers at once.

No one is let in without a key that was drawn for this job (CURVE, which also keeps others from reading). With that of
the other nodes one can do no more than send updates, which are bounded and decoded strictly; with that of the screens
no more than ask for what is shown here.
"""

from __future__ import annotations

import gc
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterable, Set
from contextlib import suppress

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from ddpdoctor.errors import RecordError, UsageError
from ddpdoctor.launch.processes import without_signals
from ddpdoctor.monitor.nodes import messages
from ddpdoctor.monitor.nodes.attached import HeldNode
from ddpdoctor.monitor.nodes.front import Front
from ddpdoctor.monitor.nodes.meeting import HeadKeys, Meeting, endpoint, listening_sockets, own_addresses
from ddpdoctor.monitor.nodes.messages import PROTOCOL
from ddpdoctor.monitor.nodes.screens import MOST_SCREENS, Screens
from ddpdoctor.record import layout
from ddpdoctor.record.writer import epoch_ns

WHOLE_ROWS = 400_000
"""Steps of all ranks together that are kept."""
FEWEST_ROWS = 256
MOST_NODES = 4_096
_POLL_MS = 100
_LINGER_MS = 200
LAST_MESSAGE_S = 10.0
"""For so long a head that is over waits until those who look on have its last snapshot, which a slow link delays."""
FULL_COLLECTIONS_EVERY = 1_000
_FRAMES = 2
"""Of a message: who it is from, and what is said."""
_BACKLOG = 8
"""Messages of or for one of the others: each sends the next when the last one is answered."""
_FLOOD_PAUSE_S = 0.001
MESSAGES_PER_S = 400
"""Of all nodes together, and four of each where these are more; beyond that each message is kept waiting."""
UNPACKED_BYTES_OF_RANK = 4 << 20
"""What a rank's part of an update may have: 4,096 steps and calls are 1.5 MB."""
CLAIMED_NS = 3_000_000_000
"""A rank is a node's for so long after its newest update."""
_OTHER_PEERS = 16
"""Connections beside one of each node and screen: those of one that comes back, and of one that was there before."""
_MOST_LIARS = 64
_TAKEN_AT_ONCE = 64
SWITCH_S = 0.001
"""While it listens its thread gets its turn that soon, and not after Python's 5 ms: 512 nodes send as many messages a
second, and for each it waits for its turn several times."""


class _Allowed:
    """The keys that are let in, in the form that pyzmq asks for."""

    def __init__(self, keys: Iterable[bytes]) -> None:
        self._keys = frozenset(keys)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client's key is one of the job's."""
        return any(secrets.compare_digest(bytes(key), known) for known in self._keys)


class Head:
    """Listens as soon as it is made. Raises UsageError where the port is taken or forbidden."""

    def __init__(self, host: str = "", port: int = 0, keys: HeadKeys | None = None) -> None:
        """``host`` and ``port`` are what the user gave: the address that agents use, and the port to listen on.

        ``keys`` are those of a head whose place this one takes, on its port unless another one is given.
        """
        self.keys = keys or _drawn()
        port = port or (0 if keys is None else keys.meeting.port)
        nodes, screens = self.keys.meeting, self.keys.screens
        self._context = zmq.Context()
        self._guard = ThreadAuthenticator(self._context)
        with without_signals():
            self._guard.start()
        allowed = _Allowed([nodes.client_key.encode("ascii"), screens.client_key.encode("ascii")])
        self._guard.configure_curve_callback(domain="*", credentials_provider=allowed)
        # A full collection of garbage goes through the rows of all ranks, which hold no cycle: 0.9 s with 4,096 ranks.
        gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTIONS_EVERY)
        self._socket = self._context.socket(zmq.ROUTER)
        listening: list[socket.socket] = []
        try:
            self._prepare(self.keys.server_secret.encode("ascii"))
            listening, self.listens = listening_sockets(host, port)
            bound = int(listening[0].getsockname()[1])
            self.front = Front(self._socket, listening, MOST_NODES + MOST_SCREENS)
        except (zmq.ZMQError, OSError) as error:
            for one in listening:
                one.close()
            self._socket.close(0)
            self._guard.stop()
            self._context.term()
            where = f"{endpoint(host, port).removeprefix('tcp://')}" if host else f"port {port}" if port else "any port"
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"cannot listen on {where}: {reason}", "Give another one with `--head HOST:PORT`."
            ) from error
        placed = {"port": bound, "addresses": (host,) if host else own_addresses()}
        nodes, screens = (msgspec.structs.replace(one, protocol=PROTOCOL, **placed) for one in (nodes, screens))
        self.keys = HeadKeys(server_secret=self.keys.server_secret, meeting=nodes, screens=screens)
        self.meeting = nodes
        self._host = socket.gethostname()
        self.screens = Screens(self._host)
        """Those that are shown elsewhere."""
        self.verdict = ""
        """What the agents are reported of the verdict on all ranks."""
        self.lock = threading.Lock()
        """Held while ``nodes`` are looked at or changed."""
        self.nodes: dict[str, HeldNode] = {}
        self.was_reached = False
        """Some monitor of another node has got through, whatever it said."""
        self.unusable: set[str] = set()
        """Sessions whose data made a look fail."""
        self.strange = 0
        """Messages that could not be read."""
        self.others = ""
        """Why a node was refused for its version, as a sentence; empty where none was."""
        self.trouble = ""
        """What failed here, as a sentence; empty while all is well."""
        self.lies: dict[str, tuple[str, int, int]] = {}
        """Of peers with a key of the job whose messages cannot be true: by address what is wrong with them, and since
        when and until when they came, in ns."""
        self._own: frozenset[int] = frozenset()
        """The ranks of this machine, …"""
        self._world_size = 0
        """… of so many; 0 while that is not known."""
        self._tokens, self._counted_s = float(MESSAGES_PER_S), 0.0
        self._drops_at_ns = 0
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_S, self._switch_s))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpdoctor-head", daemon=True)
        with without_signals():
            self._thread.start()

    def ask_for_stacks(self, rank: int) -> None:
        """Have the node of a rank ask it for its stacks."""
        with self.lock:
            for node in self.nodes.values():
                if rank in node.ranks:
                    node.asks = (*node.asks, rank)[-8:]

    def forget_gone(self, own: Set[int], world_size: int, now_ns: int) -> None:
        """Forget lost nodes where all ranks of the job are seen without them: it was started again, and they left.

        What others may report from now on is of the other ranks of a job of this size.
        """
        self.front.limit(2 * max(0, world_size - len(own)) + MOST_SCREENS + _OTHER_PEERS)
        with self.lock:
            self._own, self._world_size = frozenset(own), world_size
            lost = [session for session, node in self.nodes.items() if node.is_lost(now_ns)]
            seen = {rank for session, node in self.nodes.items() if session not in lost for rank in node.ranks}
            if lost and len(own | seen) >= world_size:
                for session in lost:
                    del self.nodes[session]

    def close(self) -> None:
        """Listen no longer."""
        self._over.set()
        self._thread.join(timeout=LAST_MESSAGE_S + 5)
        sys.setswitchinterval(self._switch_s)
        self._guard.stop()
        self._context.destroy(linger=_LINGER_MS)
        self.front.close()

    def _prepare(self, secret: bytes) -> None:
        own = self._socket
        own.curve_server = True
        own.curve_secretkey = secret
        own.maxmsgsize = messages.MOST_BYTES
        own.rcvhwm = own.sndhwm = _BACKLOG
        own.linger = _LINGER_MS
        own.backlog = MOST_NODES
        own.handshake_ivl = 10_000

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                if self._socket.poll(_POLL_MS):
                    # Whatever waits is taken in before anything else is looked at: each look may cost a turn.
                    with suppress(zmq.Again):
                        for _ in range(_TAKEN_AT_ONCE):
                            self._receive()
                self._show(self.screens.due(time.monotonic()))
            except zmq.ContextTerminated:
                return
            except zmq.ZMQError:
                continue
            except Exception as error:  # Of ours: the user is told, and the other nodes are still received.
                self.strange += 1
                self.trouble = f"some messages of other machines could not be processed: {error!r}"[:500]
        with suppress(Exception):  # The last word to who looks on; the watching is over anyway.
            self._send_last_messages()
        self._socket.close(_LINGER_MS)

    def _receive(self) -> None:
        frames, size = messages.received(self._socket, _FRAMES)
        received_ns = epoch_ns()
        source = self.front.taken(int(frames[-1].get("__fd")), size)
        identity, *parts = [frame.bytes for frame in frames]
        if self._is_flooded():
            self._over.wait(_FLOOD_PAUSE_S)
        if frames[-1].get("User-Id") == self.keys.screens.client_key:
            said = self._answered(identity, parts)
        else:
            answer = self._answer(parts, received_ns, source)
            said = None if answer is None else messages.pack_answer(answer)
        if said is not None:
            # Who is gone by now gets nothing, and no one waits for it.
            self._socket.send_multipart([identity, said], zmq.NOBLOCK)

    def _send_last_messages(self) -> None:
        """Show the end; a connection that is closed loses what is still under way when the other side says more."""
        self._show(self.screens.last_messages())
        until_s = time.monotonic() + LAST_MESSAGE_S
        while not self.screens.have_the_last and time.monotonic() < until_s:
            if self._socket.poll(_POLL_MS):
                frames, _ = messages.received(self._socket, _FRAMES)
                if frames[-1].get("User-Id") == self.keys.screens.client_key:
                    identity, *parts = [frame.bytes for frame in frames]
                    self._answered(identity, parts)

    def _answered(self, screen: bytes, parts: list[bytes]) -> bytes | None:
        """Take in what a screen asks for; what it is answered at once."""
        now_s = time.monotonic()
        if self.screens.is_flooded(now_s):
            self._over.wait(_FLOOD_PAUSE_S)
        try:
            return self.screens.take(screen, parts, now_s)
        except RecordError:
            self.strange += 1
            return None

    def _show(self, answers: Iterable[tuple[bytes, list[bytes]]]) -> None:
        for screen, answer in answers:
            self._socket.send_multipart([screen, *answer], zmq.NOBLOCK)

    def _answer(self, parts: list[bytes], received_ns: int, source: str) -> messages.Answer | None:
        """Take in one message; None where it was none of ours."""
        if len(parts) != 1:
            self.strange += 1
            return None
        try:
            update = messages.decoded(parts[0], messages.UPDATES, self._most_unpacked())
            self.was_reached = True
            with self.lock:
                return self._taken(update, len(parts[0]), received_ns, source)
        except messages.OtherVersion as other:
            self.was_reached = True
            self.others = f"the monitor on {other.host} runs another version of ddpdoctor: its messages cannot be read"
            return self._refusal(other.number, other.reason)
        except (RecordError, ValueError, TypeError, KeyError):
            self.strange += 1
            self._doubt(source, "cannot be read", received_ns)
            return None

    def _is_flooded(self) -> bool:
        """Count a message; whether all together sent far more of late than nodes do, which is one a second each."""
        now_s = time.monotonic()
        rate = max(MESSAGES_PER_S, 4 * len(self.nodes))
        self._tokens = max(-1.0, min(float(rate), self._tokens + (now_s - self._counted_s) * rate) - 1)
        self._counted_s = now_s
        return self._tokens < 0

    def _most_unpacked(self) -> int:
        """Return how many bytes an update may have when it is unpacked: what all ranks of other nodes may need."""
        if not self._world_size:
            return messages.MOST_UNPACKED_BYTES
        others = max(0, self._world_size - len(self._own))
        return min(messages.MOST_UNPACKED_BYTES, UNPACKED_BYTES_OF_RANK * (others + 1))

    def _doubt(self, source: str, reason: str, now_ns: int) -> None:
        since_ns = self.lies[source][1] if source in self.lies else now_ns
        if source in self.lies or len(self.lies) < _MOST_LIARS:
            self.lies[source] = reason, since_ns, now_ns

    def _contradiction(self, update: messages.Update, node: HeldNode, source: str, now_ns: int) -> str:
        """Return why an update cannot be true, as the rest of a sentence on who sends it; empty where it may be."""
        if node.source != source and source and not node.is_silent(now_ns) and node.number:
            return f"claim to be the monitor on {node.host}, which sends from {node.source}"
        size = self._world_size
        if not size:
            return ""
        if update.job.world_size not in (0, size):
            return f"are of a job of {update.job.world_size} ranks, and this one has {size}"
        ranks = (
            {row.rank for row in messages.unpack_field("ranks", update.fields["ranks"])}
            if "ranks" in update.fields
            else set()
        )
        if wrong := [rank for rank in ranks if not 0 <= rank < size]:
            return f"are of rank {wrong[0]} of a job of {size}"
        if mine := ranks & self._own:
            return f"are of rank {min(mine)}, which runs on this machine"
        for other in self.nodes.values():
            # Where a job was started again nodes may have changed their ranks, and one of them says so first.
            if other is not node and now_ns - other.received_ns < CLAIMED_NS and (both := ranks & {*other.ranks}):
                return f"are of rank {min(both)}, which {other.host} reports"
        return ""

    def _refusal(self, number: int, reason: str) -> messages.Answer:
        return messages.Answer(number=number, host=self._host, refused=reason, sent_at_ns=epoch_ns())

    def _drop_replaced(self, session: str, now_ns: int) -> None:
        """Forget the nodes of which nothing more will come, and whose ranks another monitor reports by now."""
        if now_ns < self._drops_at_ns:
            return
        self._drops_at_ns = now_ns + 1_000_000_000
        living = {rank for node in self.nodes.values() if not node.is_silent(now_ns) for rank in node.ranks}
        for known, node in list(self.nodes.items()):
            if known != session and node.is_silent(now_ns) and living.issuperset(node.ranks):
                del self.nodes[known]

    def _taken(self, update: messages.Update, size: int, received_ns: int, source: str) -> messages.Answer:
        node = self.nodes.get(update.session) or HeldNode(update.session, update.host, source)
        if contradiction := self._contradiction(update, node, source, received_ns):
            self._doubt(source, contradiction, received_ns)
            return self._refusal(update.number, f"the messages of this node {contradiction}"[:500])
        if update.session in self.unusable:
            return self._refusal(update.number, "what this node reports cannot be used")
        if update.state == "left":
            self.nodes.pop(update.session, None)
            return self._refusal(update.number, "")
        self._drop_replaced(update.session, received_ns)
        most = min(MOST_NODES, 2 * (self._world_size - len(self._own)) + 2) if self._world_size else MOST_NODES
        if update.session not in self.nodes and len(self.nodes) >= most:
            return self._refusal(update.number, f"it holds {most} nodes already")
        node.source = source
        asks: tuple[int, ...] = ()
        send_all = not node.takes(update)
        if not send_all:
            if update.number != node.number:
                ranks = max(self._world_size or update.job.world_size, 1)
                most = min(layout.LIVE_ROWS, max(FEWEST_ROWS, WHOLE_ROWS // ranks))
                node.take(update, received_ns, most)
                node.bytes += size
                self.nodes[update.session] = node
            asks, node.asks = node.asks, ()
        return messages.Answer(
            number=update.number,
            received_at_ns=received_ns,
            send_all=send_all,
            host=self._host,
            verdict=self.verdict,
            asks=asks,
            sent_at_ns=epoch_ns(),
        )


def _drawn() -> HeadKeys:
    """New keys, of a head that does not listen yet."""
    (server, server_secret), *clients = [[key.decode("ascii") for key in zmq.curve_keypair()] for _ in range(3)]
    nodes, screens = (
        Meeting(port=0, server_key=server, client_key=public, client_secret=secret, protocol=PROTOCOL)
        for public, secret in clients
    )
    return HeadKeys(server_secret=server_secret, meeting=nodes, screens=screens)
