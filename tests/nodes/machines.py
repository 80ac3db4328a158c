"""Machines for tests: network namespaces on a bridge, each with its own host name, hosts file, home and temp directory.

A link between them can be slow, narrow or cut. All of it needs root; elsewhere the tests
are skipped with the reason that ``why_not`` gives.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.jobs_of_tests import kill_marked, marked

ROOT = Path(__file__).parents[2]
_NUMBERS = itertools.count()


def why_not() -> str:
    """Why there can be no such machines here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "there is no `ip` or no `unshare`"
    tried = subprocess.run(("unshare", "--net", "--mount", "--uts", "true"), capture_output=True, check=False)
    return "" if tried.returncode == 0 else "namespaces cannot be made here"


class Machine:
    """One node: its namespace, its address and its directory."""

    def __init__(self, name: str, space: str, address: str, home: Path) -> None:
        self.name = name
        self.space = space
        self.address = address
        self.home = home
        self.interface = "eth0"

    def run(self, *words: str) -> None:
        """Run a command in its network, to its end."""
        subprocess.run(("ip", "netns", "exec", self.space, *words), check=True, capture_output=True)

    def start(
        self, words: Sequence[str], environment: Mapping[str, str] | None = None, *, output: str = "out.txt"
    ) -> subprocess.Popen[bytes]:
        """Start a command there, in its home; both of its outputs go to a file of it."""
        inner = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        hosts = str(self.home.parent / "hosts")
        spaces = ("ip", "netns", "exec", self.space, "unshare", "--uts", "--mount")
        with (self.home / output).open("wb") as file:
            return subprocess.Popen(
                (*spaces, "sh", "-c", inner, self.name, hosts, *words),
                cwd=self.home,
                env={
                    **marked(os.environ, self.home.parent),
                    "HOME": str(self.home),
                    "TMPDIR": str(self.home / "tmp"),
                    "XDG_STATE_HOME": str(self.home / "state"),
                    "OMP_NUM_THREADS": "1",
                    **(environment or {}),
                },
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def text(self, name: str = "out.txt") -> str:
        """What a command there has written."""
        return (self.home / name).read_text(errors="replace")

    def narrow(self, rate: str) -> None:
        """Let it send no more than so, as in ``narrow("50mbit")``."""
        bucket = ("rate", rate, "burst", "64kb", "latency", "400ms")
        self.run("tc", "qdisc", "replace", "dev", self.interface, "root", "tbf", *bucket)

    def end(self, number: signal.Signals) -> None:
        """Send a signal to all that runs there."""
        listed = subprocess.run(("ip", "netns", "pids", self.space), check=True, capture_output=True, text=True)
        for pid in listed.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), number)

    def silence(self, port: int) -> None:
        """Drop what it answers at a TCP port, without a word, as a firewall does."""
        self.run("ip", "rule", "add", "pref", "10", "ipproto", "tcp", "sport", str(port), "blackhole")

    def cut(self, *, down: bool = True) -> None:
        """Take its interface down, or up again."""
        self.run("ip", "link", "set", self.interface, "down" if down else "up")


@contextmanager
def machines(
    directory: Path, count: int = 2, *, delay_ms: float = 0.0, only_ipv6: bool = False
) -> Iterator[list[Machine]]:
    """So many machines on one bridge, ``node0`` and on; gone, with all that runs on them, afterwards.

    What goes to and comes from the last one takes ``delay_ms`` longer.
    """
    tag = f"{os.getpid() % 100_000:x}{next(_NUMBERS):x}"
    network, bridge = f"10.{77 + os.getpid() % 100}.{next(_NUMBERS) % 250}", f"ddpb{tag}"
    made: list[Machine] = []
    carriers: list[subprocess.Popen[bytes]] = []
    _run("ip", "netns", "add", f"ddps{tag}")
    switch = ("ip", "-n", f"ddps{tag}")
    try:
        _run(*switch, "link", "add", bridge, "type", "bridge")
        _run(*switch, "link", "set", bridge, "up")
        for number in range(count):
            home = directory / f"node{number}"
            (home / "tmp").mkdir(parents=True)
            address = f"fd00:77::{number + 1}" if only_ipv6 else f"{network}.{number + 1}"
            machine = Machine(f"node{number}", f"ddpn{tag}{number}", address, home)
            _run("ip", "netns", "add", machine.space)
            made.append(machine)
            port = f"ddpp{tag}{number}"
            if delay_ms and number == count - 1:
                carriers.append(_delayed(machine, f"ddps{tag}", port, delay_ms, directory))
            else:
                _run(*switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", machine.space)
            _run(*switch, "link", "set", port, "master", bridge, "up")
            if only_ipv6:
                machine.run("ip", "address", "add", f"{machine.address}/64", "dev", "eth0", "nodad")
            else:
                machine.run("ip", "address", "add", f"{machine.address}/24", "dev", "eth0")
            machine.run("ip", "link", "set", "eth0", "up")
            machine.run("ip", "link", "set", "lo", "up")
        hosts = "".join(f"{machine.address} {machine.name}\n" for machine in made)
        (directory / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n" + hosts)
        yield made
    finally:
        kill_marked(directory)
        for carrier in carriers:
            carrier.communicate()
        for space in (*(machine.space for machine in made), f"ddps{tag}"):
            subprocess.run(("ip", "netns", "delete", space), check=False, capture_output=True)


def watched(machine: Machine, head: Machine, number: int, script: Path, *, nodes: int = 2, ranks: int = 2) -> list[str]:
    """The words that watch one node of a job, with nothing given but what torchrun needs."""
    return [
        *(sys.executable, "-m", "ddpdoctor", "profile", "--no-tui", "--output-format", "json", "-o", "report.json"),
        *("--", sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--node-rank", str(number)),
        *("--nproc-per-node", str(ranks), "--master-addr", head.address, "--master-port", "29533", str(script)),
    ]


def _delayed(machine: Machine, switch: str, port: str, delay_ms: float, directory: Path) -> subprocess.Popen[bytes]:
    """Connect a machine by a link that takes its time; what carries its frames ends with the test's jobs."""
    words = (sys.executable, "-m", "tests.nodes.delay", machine.space, "eth0", switch, port, str(delay_ms))
    carrier = subprocess.Popen(words, stdout=subprocess.PIPE, env=marked(os.environ, directory), cwd=ROOT)
    assert carrier.stdout is not None and carrier.stdout.readline() == b"up\n"
    return carrier


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
