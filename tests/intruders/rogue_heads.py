"""Who listens where an agent or a screen expects its head: without its key, or with it and saying what no head says."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import zmq

from ddpdoctor.errors import UsageError
from ddpdoctor.monitor.nodes.agent import Agent
from ddpdoctor.monitor.nodes.attached import AttachedRun
from ddpdoctor.monitor.nodes.front import GREETING
from ddpdoctor.monitor.nodes.meeting import Meeting
from ddpdoctor.monitor.nodes.messages import PROTOCOL, Answer, pack_answer
from tests.intruders.attack import again_and_again
from tests.intruders.liars import _RECORD

Meet = Callable[[], str]


def memory_mb() -> float:
    """Of this process."""
    return int(re.findall(r"^VmRSS:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)[0]) / 1_000


def met(meet: Meet) -> tuple[float, str]:
    """Return how much more memory it took at the most, and what was said."""
    before_mb = most_mb = memory_mb()
    over = threading.Event()

    def look() -> None:
        nonlocal most_mb
        while not over.wait(0.02):
            most_mb = max(most_mb, memory_mb())

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    said = meet()
    over.set()
    looking.join()
    return most_mb - before_mb, said


@contextmanager
def _raw(content: bytes, *, endless: bool = False) -> Iterator[Meeting]:
    """A port that says this to everyone."""
    public, secret = zmq.curve_keypair()
    held = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.2)

        def serve() -> None:
            near, _ = listening.accept()
            held.append(near)
            near.settimeout(0.5)
            near.sendall(content)
            while endless:
                near.sendall(bytes(1 << 20))

        with again_and_again(serve, 2):
            yield _meeting(listening.getsockname()[1], zmq.curve_keypair()[0], public, secret)
    for one in held:
        one.close()


@contextmanager
def _with_key(answer: Callable[[], list[bytes]]) -> Iterator[Meeting]:
    """A head with the right key that answers all with this."""
    public, secret = zmq.curve_keypair()
    context = zmq.Context()
    own = context.socket(zmq.ROUTER)
    own.curve_server, own.curve_secretkey = True, secret
    port = own.bind_to_random_port("tcp://127.0.0.1")

    def serve() -> None:
        if own.poll(100):
            sender, *_ = own.recv_multipart()
            for _ in range(20):
                own.send_multipart([sender, *answer()], zmq.NOBLOCK)

    try:
        with again_and_again(serve):
            yield _meeting(port, public, *zmq.curve_keypair())
    finally:
        context.destroy(linger=0)


def _meeting(port: int, server: bytes, public: bytes, secret: bytes) -> Meeting:
    keys = {"server_key": server.decode(), "client_key": public.decode(), "client_secret": secret.decode()}
    return Meeting(port=port, addresses=("127.0.0.1",), protocol=PROTOCOL, **keys)


def _agent(where: Callable[[], AbstractContextManager[Meeting]]) -> Meet:
    def meet() -> str:
        with where() as meeting:
            agent = Agent(meeting)
            try:
                until_s = time.monotonic() + 5
                while time.monotonic() < until_s:
                    agent.offer(_RECORD, is_quiet=False, ended=False, exit_code=None)
                    time.sleep(0.1)
                return agent.trouble or "it goes on"
            finally:
                agent.close()

    return meet


def _screen(where: Callable[[], AbstractContextManager[Meeting]]) -> Meet:
    def meet() -> str:
        with where() as meeting:
            try:
                AttachedRun(meeting).close()
            except UsageError as error:
                return error.message
            return "it was shown something"

    return meet


def _endless() -> list[bytes]:
    return [pack_answer(Answer(number=1, asks=tuple(range(64)), host="x" * 255, verdict="y" * 2_000))]


_HUGE = GREETING + b"\x06" + ((64 << 20) - 1).to_bytes(8, "big") + bytes(20 << 20)
ROGUE_HEADS: Mapping[str, Meet] = {
    "an agent and rubbish": _agent(lambda: _raw(bytes(range(256)) * 40)),
    "an agent and bytes without an end": _agent(lambda: _raw(GREETING, endless=True)),
    "an agent and an unfinished frame of 64 MiB": _agent(lambda: _raw(_HUGE)),
    "an agent and answers that are none": _agent(lambda: _with_key(lambda: [b"\xc1" * 5_000] * 3)),
    "an agent and answers of 9 MiB": _agent(lambda: _with_key(lambda: [bytes(9 << 20)])),
    "an agent and answers that ask for ever more": _agent(lambda: _with_key(_endless)),
    "a screen and rubbish": _screen(lambda: _raw(bytes(range(256)) * 40)),
    "a screen and bytes without an end": _screen(lambda: _raw(GREETING, endless=True)),
    "a screen and an unfinished frame of 64 MiB": _screen(lambda: _raw(_HUGE)),
    "a screen and answers that are none": _screen(lambda: _with_key(lambda: [b"\xc1" * 5_000])),
}
