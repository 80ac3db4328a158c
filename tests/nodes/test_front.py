"""Where the head listens, what a stranger may hold there, and what those with a key may hold together."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import Any

import pytest

from ddpdoctor.monitor.nodes import front
from ddpdoctor.monitor.nodes.front import FIRST_BYTES, GREETING, Lobby, source_of
from ddpdoctor.monitor.nodes.head import Head
from ddpdoctor.monitor.nodes.meeting import listening_sockets
from tests.intruders.attack import CLIENT_GREETING, first_words, held_back, many, with_keys
from tests.nodes.test_head import forwarding, listening, until


def addresses(host: str) -> tuple[set[str], str]:
    own, said = listening_sockets(host, 0)
    with ExitStack() as stack:
        for one in own:
            stack.enter_context(one)
        return {str(one.getsockname()[0]) for one in own}, said


def named(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Have ``node0`` stand for an address."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *of, **more: found)


def test_an_address_of_this_machine_is_the_only_one_that_is_listened_on() -> None:
    assert addresses("127.0.0.1") == ({"127.0.0.1"}, "")
    assert addresses("127.0.0.7") == ({"127.0.0.7"}, "")
    assert addresses("localhost")[0] <= {"127.0.0.1", "::1"}
    with listening() as head:
        refused = socket.socket()
        with refused, pytest.raises(ConnectionRefusedError):
            refused.connect(("127.0.0.2", head.meeting.port))


def test_without_an_address_it_is_all_of_them() -> None:
    everywhere, said = addresses("")
    assert everywhere in ({"::"}, {"0.0.0.0"}) and said == ""


def test_a_name_that_is_no_address_of_this_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "192.0.2.1")
    everywhere, said = addresses("node0")
    assert everywhere in ({"::"}, {"0.0.0.0"})
    assert said == "node0 is not an address of this machine: port 0 is open on all of its addresses"


def test_a_host_name_that_stands_for_loopback_here_means_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "127.0.1.1")
    everywhere, said = addresses("node0")
    assert everywhere in ({"::"}, {"0.0.0.0"})
    assert said.startswith("node0 is only a loopback address on this machine")


def test_in_a_full_lobby_the_source_with_most_makes_room_with_its_oldest() -> None:
    lobby: Lobby[str] = Lobby(4, 3, 5.0, 0.1)
    for at, (name, source) in enumerate([("a", "s"), ("x", "t"), ("b", "s"), ("c", "s")]):
        assert lobby.add(name, source, float(at)) is None
    assert not lobby.has_room(0.05) and lobby.has_room(3.0)
    assert lobby.add("y", "t", 4.0) == "a"
    lobby.remove("a")
    assert list(lobby.overdue(6.5)) == ["x"]
    lobby.remove("x")
    assert lobby.add("d", "s", 6.6) is None
    assert lobby.add("e", "s", 6.7) == "b", "of one source there are no more than three"
    lobby.remove("b")
    for at in range(9):  # Which is given time anew is still one.
        assert lobby.add("c", "s", 7.0 + at) is None
    assert list(lobby.all()) == ["y", "d", "e", "c"]


@pytest.mark.parametrize(
    ("address", "source"),
    [
        (("10.0.0.1", 5), "10.0.0.1"),
        (("::ffff:10.0.0.1", 5, 0, 0), "10.0.0.1"),
        (("2001:db8:0:1::7", 5, 0, 0), "2001:db8:0:1::/64"),
        (("", 0), ""),
    ],
)
def test_who_has_an_address_of_a_network_has_all(address: Any, source: str) -> None:
    assert source_of(address) == source


def is_closed(own: socket.socket) -> bool:
    own.settimeout(30)
    try:
        while own.recv(4_096):
            pass
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", CLIENT_GREETING + b"\x06" + bytes(500), b"\xff" * 64])
def test_what_is_no_handshake_of_ours_is_cut_off_at_once(said: bytes) -> None:
    with listening() as head, many(head.meeting.port, 1, said) as (own,):
        assert is_closed(own)
        assert not head.front._peers


def test_who_says_nothing_more_is_cut_off_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "PATIENCE_S", 0.3)
    with listening() as head:
        hello = first_words(head.meeting, head.meeting.port)
        assert len(hello) == FIRST_BYTES
        for said in (b"", CLIENT_GREETING, hello):
            with many(head.meeting.port, 1, said) as (own,):
                assert is_closed(own)


def test_many_strangers_hold_few_descriptors_and_agents_get_in() -> None:
    with listening() as head, many(head.meeting.port, 400, GREETING[:1]):
        with forwarding(head.meeting) as agent:
            until(lambda: bool(agent.answered_s))
        assert len(head.front._strangers.all()) <= front.MOST_OF_ONE


def test_who_was_refused_again_and_again_may_still_get_in() -> None:
    with listening() as head:
        for _ in range(2 * front.MOST_OF_ONE):
            with many(head.meeting.port, 1, CLIENT_GREETING + b"\x04\xc8\x05HELLO\x01\x00" + bytes(192)) as (own,):
                assert is_closed(own)
        with forwarding(head.meeting) as agent:
            until(lambda: bool(agent.answered_s), 20)


def test_unfinished_messages_are_bounded_together_and_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "AHEAD_TOGETHER", 1 << 20)
    with listening() as head, held_back(head.meeting.port, 900_000) as port, with_keys(head.meeting, port, 6) as held:
        for one in held:
            one.send(bytes(1 << 20))
        until(lambda: head.front._ahead >= 1 << 20)
        with forwarding(head.meeting) as agent:  # A short message gets through all the same.
            until(lambda: bool(agent.answered_s))
        until(lambda: head.front.turned_away > 0)
        assert head.front._ahead < (1 << 20) + 7 * (64 << 10)


def test_a_fault_of_ours_costs_one_connection_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as head:
        with monkeypatch.context() as broken, many(head.meeting.port, 1) as (own,):
            broken.setattr(front, "_is_ours", lambda said: 1 / 0)
            own.sendall(b"x")
            assert is_closed(own)
        assert "ZeroDivisionError" in head.front.trouble
        with forwarding(head.meeting) as agent:
            until(lambda: bool(agent.answered_s))


def test_a_job_of_a_few_ranks_lets_few_in_and_who_is_silent_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "SILENT_AFTER_S", 0.2)
    with listening() as head:
        head.front.limit(3)
        with with_keys(head.meeting, head.meeting.port, 3):
            until(lambda: head.front._let_in == 3)
            with forwarding(head.meeting) as agent:
                until(lambda: bool(agent.answered_s))
            assert head.front._let_in <= 3 and head.front.turned_away > 0


def test_no_one_but_the_front_gets_to_the_socket_inside() -> None:
    head = Head("127.0.0.1")
    try:
        import subprocess
        import sys

        code = "import socket, sys; own = socket.socket(socket.AF_UNIX); own.connect(bytes.fromhex(sys.argv[1]))"
        code += "; own.settimeout(20); print(own.recv(10))"
        words = (sys.executable, "-c", code, head.front._name.encode().hex())
        assert subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout == "b''\n"
    finally:
        head.close()
