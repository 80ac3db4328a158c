"""Messages of more frames than there may be: a whole one is refused, and who sends one without an end is cut off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import zmq

from ddpdoctor.monitor.nodes import front
from ddpdoctor.monitor.nodes.head import Head
from ddpdoctor.monitor.nodes.meeting import Meeting, endpoint
from ddpdoctor.monitor.nodes.messages import MOST_BYTES, connected, received
from tests.nodes.test_attach_trouble import narrow
from tests.nodes.test_head import RECORD, forwarding, listening, until


@contextmanager
def friend(meeting: Meeting, port: int) -> Iterator[zmq.Socket[bytes]]:
    """Somebody who has the key of the other nodes."""
    context = zmq.Context()
    try:
        yield connected(context, meeting, endpoint("127.0.0.1", port), MOST_BYTES, immediate=False)
    finally:
        context.destroy(linger=0)


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
        for keys in (head.meeting, head.keys.screens):
            with friend(keys, head.meeting.port) as own:
                before = head.strange
                for _ in range(3):
                    own.send_multipart([b""] * 5_000)
                until(partial(has_dropped, head, before + 3), 240)
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
