"""A connection to the head, with the keys that let one in, and the threads that hold one, which take no signals."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from ddpdoctor.monitor.nodes.meeting import Meeting

GIVEN_UP_AFTER_S = 15
"""A connection to a machine that is gone, which closes nothing."""


def connected(
    context: zmq.Context[zmq.Socket[bytes]],
    meeting: Meeting,
    where: str,
    most_bytes: int,
    *,
    immediate: bool = True,
) -> zmq.Socket[bytes]:
    """Return a socket that continues trying to reach the head, and takes no message that is longer.

    ``immediate``: nothing can be sent while there is no connection, and what a lost one brought last is lost, too.
    """
    own = context.socket(zmq.DEALER)
    own.curve_serverkey = meeting.server_key.encode("ascii")
    own.curve_publickey = meeting.client_key.encode("ascii")
    own.curve_secretkey = meeting.client_secret.encode("ascii")
    own.ipv6 = True
    own.maxmsgsize = most_bytes
    own.sndhwm = own.rcvhwm = 8
    own.reconnect_ivl, own.reconnect_ivl_max = 500, 5_000
    # Not by heartbeats of ZeroMQ: it ends the process (4.3.5: "Assertion failed: !_io_error") where one is due on a
    # connection that the other side has closed while more had come than was taken.
    own.tcp_keepalive, own.tcp_keepalive_idle, own.tcp_keepalive_intvl, own.tcp_keepalive_cnt = 1, 5, 5, 2
    own.setsockopt(zmq.TCP_MAXRT, 1_000 * GIVEN_UP_AFTER_S)
    own.immediate = immediate
    own.connect(where)
    return own


def received(own: zmq.Socket[bytes], most_frames: int) -> tuple[list[zmq.Frame], int]:
    """Return the next message, of which one frame more than there may be is kept at most, and the bytes of all of it.

    Raises zmq.Again where none is there.
    """
    frames: list[zmq.Frame] = []
    size = 0
    while True:
        frame = own.recv(zmq.NOBLOCK, copy=False)
        size += len(frame)
        if len(frames) <= most_frames:
            frames.append(frame)
        if not own.rcvmore:
            return frames, size


@contextmanager
def without_signals() -> Iterator[None]:
    """Threads that are started meanwhile never take a signal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
