"""What other machines reach of the head: a port where a stranger holds a few bytes for a few seconds, and no more.

ZeroMQ gives whoever connects a session, a descriptor and the memory of a whole message before it knows who that is, and
does not bound how many these are. So it listens inside of this process only, and the port is this front's: it plays the
first part of the handshake itself, hands the connection on to ZeroMQ once that has come with a form that only ours has,
lets a few kilobytes pass until ZeroMQ has let the peer in, and from then on bounds what all peers together have sent
that the head has not taken.

Of a CURVE handshake (ZMTP 3, RFC 26) the lengths are fixed: both greet with 64 bytes, the client sends a HELLO of 202
and is answered a WELCOME of 170 bytes, it sends INITIATE, and READY says that it is in.
"""

from __future__ import annotations

import ipaddress
import os
import resource
import secrets
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

import zmq

from ddpdoctor.launch.processes import without_signals

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE".ljust(23, b"\0") + b"\x01" + bytes(31)
"""Of a server."""
_HELLO = b"\x04\xc8\x05HELLO"
FIRST_BYTES = 64 + 202
"""A greeting and a HELLO."""
_READY_AT = 64 + 170
"""Where READY begins of what ZeroMQ answers."""
_READY = b"\x05READY"
MOST_FIRST_BYTES = 4_096
"""A peer sends no more until it is let in: INITIATE has 300 bytes, and a name of 255 at the most."""
MOST_STRANGERS = 256
MOST_OF_ONE = 128
"""Of one address; 512 nodes of a test on one machine connect at once."""
PATIENCE_S = 5.0
YOUNGEST_S = 0.1
AHEAD_ALWAYS = 16 << 10
"""So much each peer may always send that is not taken yet: an update of a second has less."""
AHEAD_TOGETHER = 24 << 20
"""All peers together no more than that: three messages of the longest."""
AHEAD_OF_ONE = 17 << 20
"""Two messages of the longest: one is sent again where the answer took long. Who sends more never ends one."""
STUCK_AFTER_S = 1.0
UNFINISHED_AFTER_S = 2.0
SILENT_AFTER_S = 5.0
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)
"""A node whose machine is gone leaves no connection open for good."""
_FRAME_BYTES = 35
"""What encryption and framing add to what is said, at the least: what is left of a message is less than a kilobyte."""
_REST_BYTES = 1_024
_CHUNK_BYTES = 64 << 10
_TICK_S = 0.1
_LAST_S = 0.5
MOST_DESCRIPTORS = 16_384
_OTHER_DESCRIPTORS = 256
"""What the monitor itself opens: of each rank some files, and pipes of what it runs."""


T = TypeVar("T")
_NETWORK_BITS = 64
"""Of an IPv6 address: whoever has one address of such a network has all of them."""


class Lobby(Generic[T]):
    """Connections that have not proved anything yet: few at once, for a short time, and none keeps the others out.

    Where it is full the source that has most connections in it loses its oldest one, so that one stranger makes room
    for others and not they for it. Used by one thread alone.
    """

    def __init__(self, most: int, most_of_one: int, patience_s: float, youngest_s: float) -> None:
        """Hold ``most`` connections at once and ``most_of_one`` of one source, each for ``patience_s``.

        One that is younger than ``youngest_s`` is never turned out for another: that long an honest one gets.
        """
        self._most, self._most_of_one = most, most_of_one
        self._patience_s, self._youngest_s = patience_s, youngest_s
        self._held: dict[T, tuple[str, float]] = {}
        self._sources: Counter[str] = Counter()

    def all(self) -> list[T]:
        """Return those that are in it, the oldest first."""
        return list(self._held)

    def has_room(self, now_s: float) -> bool:
        """Return whether another connection may be accepted: one is old enough to be turned out where it is full."""
        return len(self._held) < self._most or now_s - next(iter(self._held.values()))[1] >= self._youngest_s

    def add(self, one: T, source: str, now_s: float) -> T | None:
        """Take in a connection, or give it time anew; the one that has to go for it, which may be it itself."""
        self.remove(one)
        self._held[one] = source, now_s
        self._sources[source] += 1
        if self._sources[source] > self._most_of_one:
            return self._oldest_of(source)
        return self._oldest_of(self._sources.most_common(1)[0][0]) if len(self._held) > self._most else None

    def remove(self, one: T) -> None:
        """Forget a connection: it is closed, or needs no lobby any more."""
        held = self._held.pop(one, None)
        if held is not None:
            self._sources[held[0]] -= 1
            if not self._sources[held[0]]:
                del self._sources[held[0]]

    def overdue(self, now_s: float) -> Iterator[T]:
        """Yield the connections whose time is over; the first were taken in first."""
        for one, (_, since_s) in list(self._held.items()):
            if now_s - since_s < self._patience_s:
                return
            yield one

    def _oldest_of(self, source: str) -> T:
        return next(one for one, (of, _) in self._held.items() if of == source)


def source_of(address: Any) -> str:
    """Return who a connection is from: the address of a socket without its port, of IPv6 the network."""
    try:
        host = ipaddress.ip_address(str(address[0]).partition("%")[0])
    except (ValueError, IndexError, TypeError):
        return ""
    if isinstance(host, ipaddress.IPv6Address):
        mapped = host.ipv4_mapped
        return str(mapped or ipaddress.ip_network((int(host), 128)).supernet(new_prefix=_NETWORK_BITS))
    return str(host)


def accepted(listening: socket.socket, most: int = 64) -> Iterator[tuple[socket.socket, str]]:
    """Yield the connections that wait to be accepted, and who each is from; raises OSError where none can be."""
    for _ in range(most):
        try:
            connection, address = listening.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return
        connection.setblocking(False)
        yield connection, source_of(address)


class _Peer:
    """One connection from outside, and the one that it has to ZeroMQ inside."""

    def __init__(self, outer: socket.socket, source: str, now_s: float) -> None:
        self.outer, self.source = outer, source
        self.inner: socket.socket | None = None
        self.said = b""
        """What it has said until it was handed on; …"""
        self.heard = b""
        """… and what it has been answered until it was let in."""
        self.is_in = False
        self.to_inner = self.to_outer = b""
        """What could not be passed on yet."""
        self.ahead = 0
        """Bytes that were passed on and not taken by the head yet, …"""
        self.ahead_since_s = now_s
        """… and since when some are."""
        self.taken_s = now_s
        """When a message of it was taken last."""
        self.has_ended = False
        """One side has closed its connection."""


class Front:
    """Listens on sockets for a ROUTER that is bound inside; runs a thread of its own."""

    def __init__(self, router: zmq.Socket[bytes], listening: list[socket.socket], most_peers: int) -> None:
        """Bind the router where only this process gets in, and begin to accept. Raises zmq.ZMQError, OSError."""
        self._name = f"\0ddpdoctor-{secrets.token_hex(16)}"
        router.setsockopt(zmq.IPC_FILTER_PID, os.getpid())
        router.bind(f"ipc://@{self._name[1:]}")
        self._listening = listening
        self._most_peers = min(most_peers, (_descriptors() - _OTHER_DESCRIPTORS - MOST_STRANGERS) // 3)
        """Let in at once; each needs three descriptors."""
        self.most_peers = self._most_peers
        self.turned_away = 0
        """Peers that were let in and cut off, or found no room."""
        self.trouble = ""
        """What failed here, as a sentence; empty while all is well."""
        self._strangers: Lobby[_Peer] = Lobby(MOST_STRANGERS, MOST_OF_ONE, PATIENCE_S, YOUNGEST_S)
        self._peers: dict[bytes, _Peer] = {}
        """Those that were handed on, by the name of their inner connection."""
        self._let_in = 0
        self._ahead = 0
        self._taken: deque[tuple[bytes, int]] = deque()
        self._taken_s = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._watched: dict[socket.socket, int] = {}
        self._wakes, self._woken = socket.socketpair()
        self._over_s = 0.0
        for one in (*listening, self._woken):
            one.setblocking(False)
            self._watch(one, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="ddpdoctor-front", daemon=True)
        with without_signals():
            self._thread.start()

    def limit(self, peers: int) -> None:
        """Let no more of them in at once: so many connections a job of this size can have."""
        self.most_peers = min(peers, self._most_peers)

    def taken(self, descriptor: int, size: int) -> str:
        """Count a message that the head has taken, by ZeroMQ's descriptor; who it is from, empty where that is gone."""
        try:
            borrowed = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, descriptor)
        except OSError:
            return ""
        try:
            name = borrowed.getpeername()
        except OSError:
            return ""
        finally:
            borrowed.detach()
        self._taken.append((name, size + _FRAME_BYTES))
        if self._ahead >= AHEAD_TOGETHER // 2:
            self._wake()
        peer = self._peers.get(name)
        return "" if peer is None else peer.source

    def close(self) -> None:
        """Pass on what ZeroMQ has still said, and close all connections; the router is closed before."""
        self._over_s = time.monotonic() + _LAST_S
        self._wake()
        self._thread.join(timeout=_LAST_S + 5)

    def _wake(self) -> None:
        with suppress(OSError):
            self._wakes.send(b"x")

    def _run(self) -> None:
        try:
            while not self._over_s or (self._peers and time.monotonic() < self._over_s):
                for key, events in self._selector.select(_TICK_S):
                    if isinstance(key.data, _Peer):
                        self._served(key.data, key.fileobj, events)
                    elif key.fileobj is self._woken:
                        with suppress(OSError):
                            self._woken.recv(4_096)
                    elif not self._over_s and isinstance(key.fileobj, socket.socket):
                        self._accept(key.fileobj)
                self._settle()
                self._tick(time.monotonic())
        except Exception as error:  # Of ours: the user is told; the job and this node's record go on.
            self.trouble = f"other machines are not received any more: {error!r}"[:500]
        for peer in (*self._peers.values(), *self._strangers.all()):
            self._drop(peer)
        for own in (*self._listening, self._wakes, self._woken):
            own.close()
        self._selector.close()

    def _watch(self, own: socket.socket, events: int, data: _Peer | None) -> None:
        """Be told of these events of a socket, 0 for none."""
        before = self._watched.get(own, 0)
        if events == before:
            return
        if not before:
            self._selector.register(own, events, data)
        elif events:
            self._selector.modify(own, events, data)
        else:
            self._selector.unregister(own)
        self._watched[own] = events

    def _accept(self, listening: socket.socket) -> None:
        now_s = time.monotonic()
        if not self._strangers.has_room(now_s):
            self._watch(listening, 0, None)  # Until the next tick; meanwhile they wait in the system's queue.
            return
        try:
            for outer, source in accepted(listening, 16):
                peer = _Peer(outer, source, now_s)
                self._watch(outer, selectors.EVENT_READ, peer)
                self._hold(peer, now_s)
                with suppress(OSError):
                    for level, option, value in _OPTIONS:
                        outer.setsockopt(level, option, value)
                    outer.send(GREETING)
        except OSError:  # No descriptors: those who wait do so until there are.
            self._watch(listening, 0, None)

    def _hold(self, peer: _Peer, now_s: float) -> None:
        """Give it a few seconds."""
        gone = self._strangers.add(peer, peer.source, now_s)
        if gone is not None:
            self._drop(gone)

    def _served(self, peer: _Peer, own: object, events: int) -> None:
        try:
            if peer.inner is None:
                self._greet(peer)
            elif own is peer.outer:
                if events & selectors.EVENT_WRITE:
                    self._pass_on(peer, b"", inwards=False)
                if events & selectors.EVENT_READ:
                    self._from_outside(peer)
            else:
                if events & selectors.EVENT_WRITE:
                    self._pass_on(peer, b"", inwards=True)
                if events & selectors.EVENT_READ:
                    self._from_inside(peer)
        except BlockingIOError:
            return
        except OSError:
            self._drop(peer)
        except Exception as error:  # Of ours: it costs this connection, which comes back if it is a node's.
            self.trouble = f"a connection of another machine failed: {error!r}"[:500]
            self._drop(peer)

    def _greet(self, peer: _Peer) -> None:
        """Take in a greeting and a HELLO, and hand the connection on."""
        content = peer.outer.recv(FIRST_BYTES - len(peer.said))
        peer.said += content
        if not content or not _is_ours(peer.said):
            self._drop(peer)
        elif len(peer.said) == FIRST_BYTES:
            inner = peer.inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            inner.setblocking(False)
            inner.bind("")  # The system gives it a name, by which ZeroMQ's end tells who it is.
            self._peers[inner.getsockname()] = peer
            try:
                inner.connect(self._name)
                inner.send(peer.said)
            except BlockingIOError as error:  # ZeroMQ has hundreds to accept; this one tries again by itself.
                raise ConnectionRefusedError from error
            self._interest(peer)

    def _from_outside(self, peer: _Peer) -> None:
        if not peer.is_in:
            content = peer.outer.recv(MOST_FIRST_BYTES - len(peer.said))
            peer.said += content
            if len(peer.said) >= MOST_FIRST_BYTES:
                content = b""
        else:
            is_full = self._ahead >= AHEAD_TOGETHER
            if is_full and peer.ahead >= AHEAD_ALWAYS:
                self._interest(peer)
                return
            content = peer.outer.recv(AHEAD_ALWAYS if is_full else _CHUNK_BYTES)
            if not peer.ahead:
                peer.ahead_since_s = time.monotonic()
            peer.ahead += len(content)
            self._ahead += len(content)
            if peer.ahead > AHEAD_OF_ONE:
                self.turned_away += 1
                content = b""
        if not content:
            self._drop(peer)
            return
        self._pass_on(peer, content, inwards=True)

    def _from_inside(self, peer: _Peer) -> None:
        assert peer.inner is not None
        content = peer.inner.recv(_CHUNK_BYTES)
        if not content:
            peer.has_ended = True
            self._hold(peer, time.monotonic())
            self._pass_on(peer, b"", inwards=False)
            return
        if not peer.is_in:
            before = len(peer.heard)
            peer.heard += content
            content = content[max(0, len(GREETING) - before) :]  # It was greeted when it came.
            if peer.heard[_READY_AT + 2 : _READY_AT + 2 + len(_READY)] == _READY:
                self._let_peer_in(peer)
        self._pass_on(peer, content, inwards=False)

    def _let_peer_in(self, peer: _Peer) -> None:
        """It has a key of the job: it may send, where there is room for another one, or one has long said nothing."""
        now_s = time.monotonic()
        self._strangers.remove(peer)
        if self._let_in >= self.most_peers:
            silent = min((one for one in self._peers.values() if one.is_in), key=lambda one: one.taken_s, default=peer)
            self.turned_away += 1
            if now_s - silent.taken_s < SILENT_AFTER_S:
                raise ConnectionRefusedError
            self._drop(silent)
        peer.is_in, peer.said, peer.heard, peer.taken_s = True, b"", b"", now_s
        self._let_in += 1

    def _pass_on(self, peer: _Peer, content: bytes, *, inwards: bool) -> None:
        waiting = (peer.to_inner if inwards else peer.to_outer) + content
        side = peer.inner if inwards else peer.outer
        assert side is not None
        with suppress(BlockingIOError):
            waiting = waiting[side.send(waiting) :] if waiting else b""
        if inwards:
            peer.to_inner = waiting
        else:
            peer.to_outer = waiting
            if peer.has_ended and not waiting:
                self._drop(peer)
                return
        self._interest(peer)

    def _interest(self, peer: _Peer) -> None:
        """Read from a side only what the other one takes."""
        assert peer.inner is not None
        may_send = not peer.to_inner and (peer.ahead < AHEAD_ALWAYS or self._ahead < AHEAD_TOGETHER)
        outer = selectors.EVENT_READ if may_send and not peer.has_ended else 0
        inner = selectors.EVENT_READ if not peer.to_outer and not peer.has_ended else 0
        self._watch(peer.outer, outer | (selectors.EVENT_WRITE if peer.to_outer else 0), peer)
        self._watch(peer.inner, inner | (selectors.EVENT_WRITE if peer.to_inner else 0), peer)

    def _drop(self, peer: _Peer) -> None:
        self._strangers.remove(peer)
        for own in (peer.outer, peer.inner):
            if own is None or own.fileno() < 0:
                continue
            if own is peer.inner:
                self._peers.pop(own.getsockname(), None)
            self._watch(own, 0, None)
            self._watched.pop(own, None)
            own.close()
        self._ahead -= peer.ahead
        peer.ahead = 0
        self._let_in -= peer.is_in
        peer.is_in = False

    def _settle(self) -> None:
        """Take off what the head has taken."""
        was_full = self._ahead >= AHEAD_TOGETHER
        now_s = time.monotonic()
        while self._taken:
            name, size = self._taken.popleft()
            self._taken_s = now_s
            peer = self._peers.get(name)
            if peer is None:
                continue
            left = max(0, peer.ahead - size)
            left = 0 if left < _REST_BYTES else left
            self._ahead -= peer.ahead - left
            peer.ahead, peer.ahead_since_s, peer.taken_s = left, now_s, now_s
        if was_full and self._ahead < AHEAD_TOGETHER:
            for peer in self._peers.values():
                self._interest(peer)

    def _tick(self, now_s: float) -> None:
        for stranger in self._strangers.overdue(now_s):
            self._drop(stranger)
        if not self._over_s and self._strangers.has_room(now_s):
            for listening in self._listening:
                self._watch(listening, selectors.EVENT_READ, None)
        if self._ahead >= AHEAD_TOGETHER and now_s - self._taken_s > STUCK_AFTER_S:
            # All that is there are parts of messages: whoever has long not ended one makes room.
            holding = [peer for peer in self._peers.values() if peer.ahead >= AHEAD_ALWAYS]
            oldest_s = min((peer.ahead_since_s for peer in holding), default=now_s)
            for peer in holding:
                if peer.ahead_since_s <= max(oldest_s, now_s - UNFINISHED_AFTER_S):
                    self.turned_away += 1
                    self._drop(peer)
            for peer in self._peers.values():
                self._interest(peer)


def _is_ours(said: bytes) -> bool:
    """Return whether the first bytes of a connection are those of a client of CURVE, as far as they have come."""
    whole = GREETING[:1] + said[1:9] + GREETING[9:11] + said[11:12] + GREETING[12:32] + said[32:64] + _HELLO
    # A length stands in the signature, and in the end whether it is a server, and nothing.
    return whole.startswith(said[: len(whole)])


def _descriptors() -> int:
    """Return how many descriptors this process may have, once it may have as many as are sensible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MOST_DESCRIPTORS)
