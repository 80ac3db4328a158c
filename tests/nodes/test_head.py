"""A head and its agents in one process: who is let in, what is lost, and what comes back."""

from __future__ import annotations

import random
import signal
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec
import pytest
import zmq

from ddpdoctor.errors import UsageError
from ddpdoctor.monitor.nodes import attached, messages
from ddpdoctor.monitor.nodes.agent import Agent
from ddpdoctor.monitor.nodes.head import Head
from ddpdoctor.monitor.nodes.meeting import Meeting, endpoint, reach
from ddpdoctor.monitor.nodes.messages import PROTOCOL, JobFacts, Update, pack
from ddpdoctor.record.joining import Clock
from ddpdoctor.record.model import Rank, RunRecord
from ddpdoctor.record.streams.collectives import CollectiveTrack
from tests.diagnosis.measured_job import MeasuredJob

RECORD = MeasuredJob(2).run(50, {"forward": 20.0, "backward": 40.0}, barrier=True, transfer=1.0).record()


def until(what: Callable[[], bool], patience_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def listening(port: int = 0) -> Iterator[Head]:
    head = Head("127.0.0.1", port)
    try:
        yield head
    finally:
        head.close()


@contextmanager
def forwarding(meeting: Meeting, record: RunRecord = RECORD, *, ended: bool = False) -> Iterator[Agent]:
    agent = Agent(meeting)
    agent.offer(record, is_quiet=False, ended=ended, exit_code=None)
    try:
        yield agent
    finally:
        agent.close()


def held(head: Head) -> RunRecord | None:
    with head.lock:
        nodes = list(head.nodes.values())
    return nodes[0].part(Clock()).record if nodes else None


def test_what_an_agent_offers_is_held_by_the_head_and_the_clocks_are_compared() -> None:
    with listening() as head, forwarding(head.meeting) as agent:
        head.verdict = "SLOW: rank 3"
        until(lambda: bool(agent.answered_s))
        record = held(head)
        assert record is not None
        assert (record.step_tracks, record.ranks) == (RECORD.step_tracks, RECORD.ranks)
        agent.offer(RECORD, is_quiet=True, ended=False, exit_code=None)
        until(lambda: agent.verdict == "SLOW: rank 3")
        assert agent.head_host == socket.gethostname()
        clock = agent.clock()
        assert clock is not None and clock.error_ns is not None
        assert abs(clock.offset_ns) <= clock.error_ns
        (node,) = head.nodes.values()
        until(lambda: node.is_quiet)
        until(lambda: node.bytes == agent.sent_bytes)  # Each counts for itself, and it goes on.


def test_what_is_known_of_the_clock_is_kept_until_there_is_something_to_send_with_it() -> None:
    with listening() as head, forwarding(head.meeting) as agent:
        until(lambda: agent._newest_bound is not None)
        time.sleep(1.0)  # The agent looks for something to send meanwhile, five times.
        agent.offer(RECORD, is_quiet=False, ended=False, exit_code=None)
        (node,) = head.nodes.values()
        until(lambda: node.number == 2)
        assert node.clock() is not None


def test_strangers_are_not_let_in_and_a_thousand_messages_change_nothing() -> None:
    draw, context = random.Random(0), zmq.Context()
    with listening() as head, forwarding(head.meeting) as agent:
        until(lambda: bool(agent.answered_s))
        before = held(head)
        for _ in range(50):  # A port scanner, and bytes that are no protocol of anybody's.
            with socket.create_connection(("127.0.0.1", head.meeting.port)) as scanner:
                scanner.sendall(draw.randbytes(draw.randrange(200)))
        where, sent = (
            endpoint("127.0.0.1", head.meeting.port),
            pack(Update(protocol=PROTOCOL, session="x", number=1, host="x", sent_at_ns=1)),
        )
        plain = context.socket(zmq.DEALER)
        public, secret = zmq.curve_keypair()
        keyed = context.socket(zmq.DEALER)
        keyed.curve_serverkey = head.meeting.server_key.encode()
        keyed.curve_publickey, keyed.curve_secretkey = public, secret
        for stranger in (plain, keyed):
            stranger.linger = 0
            stranger.sndhwm = 2_000
            stranger.connect(where)
            with suppress(zmq.Again):  # Whose greeting is refused takes nothing more to send.
                for _ in range(500):
                    stranger.send(draw.randbytes(100), zmq.NOBLOCK)
                stranger.send(sent, zmq.NOBLOCK)
        friend = context.socket(zmq.DEALER)
        friend.linger = 0
        friend.curve_serverkey = head.meeting.server_key.encode()
        friend.curve_publickey = head.meeting.client_key.encode()
        friend.curve_secretkey = head.meeting.client_secret.encode()
        friend.connect(where)
        for _ in range(1_000):
            friend.send_multipart([draw.randbytes(draw.randrange(300)) for _ in range(draw.choice((1, 1, 2)))])
        until(lambda: head.strange >= 1_000)
        updates = agent.sent_updates
        agent.offer(RECORD, is_quiet=True, ended=False, exit_code=None)
        until(lambda: agent.sent_updates > updates and all(node.is_quiet for node in head.nodes.values()))
        assert head.strange == 1_000
        assert list(head.nodes) == [agent._session]
        assert held(head) == before
    context.destroy(linger=0)


def test_a_message_that_is_too_long_cuts_off_who_sends_it() -> None:
    context = zmq.Context()
    with listening() as head, forwarding(head.meeting) as agent:
        until(lambda: bool(agent.answered_s))
        rude = context.socket(zmq.DEALER)
        rude.linger = 0
        rude.curve_serverkey = head.meeting.server_key.encode()
        rude.curve_publickey = head.meeting.client_key.encode()
        rude.curve_secretkey = head.meeting.client_secret.encode()
        watch = rude.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        rude.connect(endpoint("127.0.0.1", head.meeting.port))
        rude.send(bytes(messages.MOST_BYTES + 1))
        assert watch.poll(30_000)
        rude.disable_monitor()
        rude.close(0)
        assert head.strange == 0
    context.destroy(linger=0)


def test_an_agent_whose_head_comes_back_with_nothing_sends_all_again() -> None:
    with listening() as first, forwarding(first.meeting) as agent:
        until(lambda: bool(agent.answered_s))
        agent.offer(RECORD, is_quiet=False, ended=False, exit_code=None)
        until(lambda: agent._number == 2 and not first.nodes[agent._session].number < 2)
        with first.lock:
            first.nodes.clear()
        agent.offer(RECORD, is_quiet=False, ended=False, exit_code=None)  # It does not join on to anything.
        until(lambda: agent._number == 0)
        agent.offer(RECORD, is_quiet=False, ended=False, exit_code=None)
        until(lambda: bool(first.nodes))
        record = held(first)
        assert record is not None and record.step_tracks == RECORD.step_tracks


def test_the_end_of_a_node_is_waited_for() -> None:
    with listening() as head, forwarding(head.meeting, ended=True) as agent:
        agent.finish(30)
        with head.lock:
            (node,) = head.nodes.values()
        assert node.state == "ended"
        assert not node.is_lost(time.time_ns() + 10 * attached.LOST_AFTER_NS)


def test_a_node_that_is_silent_for_long_is_lost() -> None:
    with listening() as head, forwarding(head.meeting) as agent:
        until(lambda: bool(agent.answered_s))
        with head.lock:
            (node,) = head.nodes.values()
            assert not node.is_lost(time.time_ns())
            assert node.is_lost(time.time_ns() + 2 * attached.LOST_AFTER_NS)


def test_agents_of_another_version_are_told_so_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as head:
        # The agent reads the other version where the head is, and the head that of the agent in its message.
        meeting = msgspec.structs.replace(head.meeting, protocol="7.1+abc")
        monkeypatch.setattr("ddpdoctor.monitor.nodes.agent.PROTOCOL", "6.0+def")
        with forwarding(meeting) as agent:
            until(lambda: "it runs ddpdoctor 7.1, and this machine " in agent.trouble)
            until(lambda: "runs another version of ddpdoctor" in head.others)
        assert not head.nodes


def test_a_port_that_is_taken_and_a_head_that_is_not_there_are_said() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        with pytest.raises(UsageError, match=r"cannot listen on 127\.0\.0\.1:"):
            Head("127.0.0.1", taken.getsockname()[1])
        port = taken.getsockname()[1]
    where, why = reach(("127.0.0.1", "no-such-host.invalid"), port)
    assert where == ""
    assert "127.0.0.1: " in why and "no-such-host.invalid: " in why
    gone = Meeting(
        port=port,
        server_key="a" * 40,
        client_key="a" * 40,
        client_secret="a" * 40,
        addresses=("127.0.0.1",),
        protocol=PROTOCOL,
    )
    with forwarding(gone) as agent:
        until(lambda: "127.0.0.1" in agent.trouble)


def test_somebody_else_on_the_port_gets_nothing_and_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpdoctor.monitor.nodes.agent.UNREACHED_AFTER_S", 1.0)
    with listening() as head, listening() as other:
        mixed = msgspec.structs.replace(head.meeting, port=other.meeting.port)
        with forwarding(mixed) as agent:
            until(lambda: "not answer to the job's key" in agent.trouble)
            assert not other.nodes and not other.strange


def test_an_agent_comes_back_to_a_head_that_takes_the_place_of_a_dead_one() -> None:
    first = Head("127.0.0.1")
    try:
        with forwarding(first.meeting) as agent:
            until(lambda: bool(agent.answered_s))
            first.close()
            agent.offer(RECORD, is_quiet=False, ended=False, exit_code=None)
            second = Head(keys=first.keys)
            try:
                assert second.meeting.port == first.meeting.port

                def is_back() -> bool:
                    agent.offer(RECORD, is_quiet=False, ended=False, exit_code=None)
                    return bool(second.nodes)

                until(is_back)
                record = held(second)
                assert record is not None and record.step_tracks == RECORD.step_tracks
            finally:
                second.close()
    finally:
        first.close()


def flights(rank: int, *started_ns: int) -> CollectiveTrack:
    count = len(started_ns)
    columns = {name: array("q", [0] * count) for name in ("group", "signature", "site", "step", "forward_site")}
    sequence, started = array("q", range(count)), array("q", started_ns)
    return CollectiveTrack(rank=rank, sequence=sequence, started_ns=started, completed_ns=started, **columns)


def with_flights(*tracks: CollectiveTrack) -> RunRecord:
    return msgspec.structs.replace(RECORD, collectives=tracks)


def test_each_change_of_the_collectives_is_sent_and_one_that_does_not_join_on_is_told_apart() -> None:
    def sent(record: RunRecord) -> tuple[int, ...]:
        number = agent._number
        agent.offer(record, is_quiet=True, ended=False, exit_code=None)
        until(lambda: agent._number > number and node.number == agent._number)
        with head.lock:
            assert node.part(Clock()).record.collectives == record.collectives
            return (node.epoch,)

    with listening() as head, forwarding(head.meeting, with_flights(flights(0, 1_000))) as agent:
        until(lambda: bool(agent.answered_s))
        (node,) = head.nodes.values()
        assert sent(with_flights(flights(0, 1_000, 2_000))) == (0,)
        assert sent(with_flights(flights(0, 1_000, 2_000), flights(1, 1_000))) == (0,)
        assert sent(with_flights(flights(0, 2_000, 3_000), flights(1, 1_000))) == (1,)  # Its oldest was dropped.
        assert sent(with_flights(flights(0, 2_000, 3_000))) == (2,)  # A rank is gone.
        assert sent(with_flights()) == (3,)


def test_a_monitor_that_leaves_says_so_and_is_forgotten() -> None:
    with listening() as head:
        with forwarding(head.meeting) as agent:
            until(lambda: bool(agent.answered_s))
            assert list(head.nodes) == [agent._session]
            began_s = time.monotonic()
            agent.finish(30)  # The job goes on: nothing is waited for.
            assert time.monotonic() - began_s < 10
        until(lambda: not head.nodes)


def test_a_monitor_in_the_place_of_a_lost_one_replaces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached, "LOST_AFTER_NS", 500_000_000)
    monkeypatch.setattr("ddpdoctor.monitor.nodes.agent.EVERY_S", 0.0)
    with listening() as head, forwarding(head.meeting) as first:
        until(lambda: bool(first.answered_s))
        with forwarding(head.meeting) as second:

            def is_alone() -> bool:
                second.offer(RECORD, is_quiet=False, ended=False, exit_code=None)
                time.sleep(0.1)
                return list(head.nodes) == [second._session]

            until(is_alone)


def test_what_the_head_asks_waits_for_whoever_watches_the_ranks() -> None:
    with listening() as head, forwarding(head.meeting) as agent:
        until(lambda: bool(agent.answered_s))
        head.ask_for_stacks(1)
        agent.offer(RECORD, is_quiet=True, ended=False, exit_code=None)
        assert agent.asked.get(timeout=60) == 1


def test_what_fails_in_a_helper_thread_is_told_and_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpdoctor.monitor.nodes.agent.AGAIN_AFTER_S", 0.2)
    with listening() as head, forwarding(head.meeting) as agent:
        until(lambda: bool(agent.answered_s))
        with monkeypatch.context() as broken:
            broken.setattr("ddpdoctor.monitor.nodes.messages.pack_field", lambda record, name: 1 / 0)
            agent.offer(RECORD, is_quiet=False, ended=False, exit_code=None)
            until(lambda: "ZeroDivisionError" in agent.trouble)
        with monkeypatch.context() as broken:
            broken.setattr(Head, "_taken", lambda *arguments: 1 / 0)
            agent.offer(RECORD, is_quiet=False, ended=False, exit_code=None)
            until(lambda: "ZeroDivisionError" in head.trouble)
        agent.offer(RECORD, is_quiet=True, ended=False, exit_code=None)
        until(lambda: any(node.is_quiet for node in head.nodes.values()) and not agent.trouble)


def test_helper_threads_take_no_signals() -> None:
    before = set(threading.enumerate())
    with listening() as head, forwarding(head.meeting) as agent:
        until(lambda: bool(agent.answered_s))
        started = set(threading.enumerate()) - before
        assert len(started) >= 3  # The head's, the guard of its keys, and the agent's.
        for thread in started:
            with open(f"/proc/self/task/{thread.native_id}/status", encoding="ascii") as file:
                blocked = next(int(line.split()[1], 16) for line in file if line.startswith("SigBlk"))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                assert blocked >> (number - 1) & 1, thread.name


def test_what_cannot_be_true_is_refused_and_told() -> None:
    def claim(rank: int, world: int = 4) -> str:
        record = RunRecord(job=RECORD.job, ranks=(Rank(rank=rank),))
        job = JobFacts(world_size=world)
        update = Update(protocol=PROTOCOL, session=f"s{rank}", number=1, host=f"node{rank}", sent_at_ns=1, job=job)
        content = pack(msgspec.structs.replace(update, fields={"ranks": messages.pack_field(record, "ranks")}))
        answer = head._answer([content], time.time_ns(), "10.0.0.9")
        assert answer is not None
        return answer.refused

    with listening() as head:
        assert claim(3) == "", "nothing is known of the job"
        head.forget_gone({0, 1}, 4, time.time_ns())
        assert claim(2) == ""
        assert claim(0) == "the messages of this node are of rank 0, which runs on this machine"
        assert claim(4) == "the messages of this node are of rank 4 of a job of 4"
        assert claim(2, world=8) == "the messages of this node are of a job of 8 ranks, and this one has 4"
        assert list(head.nodes) == ["s3", "s2"]
        assert set(head.lies) == {"10.0.0.9"}
        stolen = Update(protocol=PROTOCOL, session="s2", number=2, host="x", sent_at_ns=1, state="left")
        answer = head._answer([pack(stolen)], time.time_ns(), "10.0.0.7")
        assert answer is not None and answer.refused.endswith("monitor on node2, which sends from 10.0.0.9")
        assert "s2" in head.nodes


def test_a_node_speaks_for_its_own_ranks_alone() -> None:
    node = attached.HeldNode("s", "b")
    whole = {name: messages.pack_field(RECORD, name) for name in messages.SENT}
    one = msgspec.structs.replace(RECORD, ranks=RECORD.ranks[1:])
    update = Update(protocol=PROTOCOL, session="s", number=1, host="x", sent_at_ns=1)
    steps = tuple(messages.pack_rows(track, anew=True) for track in RECORD.step_tracks)
    fields = {**whole, "ranks": messages.pack_field(one, "ranks")}
    node.take(msgspec.structs.replace(update, fields=fields, steps=steps), 1, 4_096)
    record = node.part(Clock()).record
    assert {track.rank for track in record.step_tracks} == {1}
    assert {row.rank for name in ("ranks", "wraps", "heartbeats") for row in getattr(record, name)} <= {1}
