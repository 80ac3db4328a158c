"""The port of a rendezvous is one that no connection of another program takes meanwhile."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ddpdoctor.probe import environment as module
from ddpdoctor.probe.environment import free_port


def test_a_port_is_free_and_the_kernel_gives_it_to_nobody() -> None:
    kernel = Path("/proc/sys/net/ipv4/ip_local_port_range")
    for _ in range(20):
        port = free_port()
        assert not kernel.exists() or port < int(kernel.read_text().split()[0])
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", port))


def test_one_that_is_taken_is_left_and_in_the_end_the_kernel_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(module, "_FIRST", port)
        monkeypatch.setattr(module, "_first_of_kernel", lambda: port + 1)
        assert free_port() != port
