"""Messages of more frames than there may be: a whole one is refused, and who sends one without an end is cut off."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest
import zmq

from ddpdoctor.monitor.nodes import front
from ddpdoctor.monitor.nodes.head import Head
from ddpdoctor.monitor.nodes.meeting import Meeting, endpoint
from ddpdoctor.monitor.nodes.messages import MOST_BYTES, connected, received
from tests.nodes.test_head import RECORD, forwarding, listening, until


@contextmanager
def friend(meeting: Meeting, port: int) -> Iterator[zmq.Socket[bytes]]:
    """Somebody who has the key of the other nodes."""
    context = zmq.Context()
    try:
        yield connected(context, meeting, endpoint("127.0.0.1", port), MOST_BYTES, immediate=False)
    finally:
        context.destroy(linger=0)


@contextmanager
def narrow(port: int, back: float, there: float) -> Iterator[int]:
    """A port that leads to another one, and brings so many bytes a second there and back."""
    over = threading.Event()

    def carry(one: socket.socket, other: socket.socket, bytes_per_s: float) -> None:
        with suppress(OSError):
            while not over.is_set() and (content := one.recv(1_024)):
                other.sendall(content)
                over.wait(len(content) / bytes_per_s)
        with suppress(OSError):
            other.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.socket()
                sockets.extend((near, far))
                # The system's buffers are not the link.
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
                far.connect(("127.0.0.1", port))
                for ends in ((near, far, there), (far, near, back)):
                    threads.append(threading.Thread(target=carry, args=ends, daemon=True))
                    threads[-1].start()

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        sockets: list[socket.socket] = []
        threads = [threading.Thread(target=accept, daemon=True)]
        threads[0].start()
        try:
            yield listener.getsockname()[1]
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
            for end in sockets:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(60)
            for end in sockets:
                end.close()


def test_of_a_message_of_many_frames_few_are_kept() -> None:
    context = zmq.Context()
    one, other = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    one.bind("inproc://frames")
    other.connect("inproc://frames")
    other.send_multipart([b"x"] * 1_000)
    other.send_multipart([b"y", b"z"])
    frames, size = received(one, 2)
    assert ([frame.bytes for frame in frames], size) == ([b"x"] * 3, 1_000)
    assert [frame.bytes for frame in received(one, 2)[0]] == [b"y", b"z"]
    with pytest.raises(zmq.Again):
        received(one, 2)
    context.destroy(linger=0)


def has_dropped(head: Head, messages: int) -> bool:
    return head.strange == messages


def is_heard(head: Head) -> None:
    with forwarding(head.meeting) as agent:
        until(lambda: bool(agent.answered_s))
        updates = agent.sent_updates
        agent.offer(RECORD, is_quiet=True, ended=False, exit_code=None)
        until(lambda: agent.sent_updates > updates and all(node.is_quiet for node in head.nodes.values()))


def test_messages_of_many_frames_change_nothing() -> None:
    with listening() as head:
        with friend(head.meeting, head.meeting.port) as own:
            for _ in range(3):
                own.send_multipart([b""] * 5_000)
            until(partial(has_dropped, head, 3), 240)
        is_heard(head)


def test_who_sends_a_message_that_does_not_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "AHEAD_OF_ONE", 100_000)
    with listening() as head, narrow(head.meeting.port, 1e9, 300_000) as port, friend(head.meeting, port) as own:
        watch = own.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        own.send_multipart([bytes(10_000)] * 500)
        assert watch.poll(60_000)
        own.disable_monitor()
        until(lambda: head.front.turned_away == 1)
        assert not head.trouble
        is_heard(head)


def test_who_has_brought_much_in_many_messages_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "AHEAD_OF_ONE", 100_000)
    with listening() as head, friend(head.meeting, head.meeting.port) as own:
        watch = own.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        for number in range(1, 9):
            own.send(bytes(60_000))
            until(partial(has_dropped, head, number))
            assert not watch.poll(300)
        own.disable_monitor()
