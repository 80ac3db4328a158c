"""Programs of a user that run outside of a rehearsal, and whatever else of the machine a script could reach.

What is reached leaves a mark: a file of the row's name in one directory, made by the program that was reached. Where a
program is reached otherwise, ``reached`` asks it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
import psutil

from tests.no_harm.world import World

READY_WITHIN_S = 30.0
_SOCKETS = (
    *("docker.sock", "podman.sock", "containerd.sock", "emacs/server", "nvim.0", "S.gpg-agent", "ssh-master"),
    *("wayland-0", "pulse/native", "vscode-ipc.sock", "X11/X97", "systemd/private", "plasma_store", "mysqld.sock"),
)
"""Dummies that listen where such programs do, by their names."""
_VICTIM = """
import ctypes, os, signal, sys, time
marks, token = sys.argv[1:]
parent = os.getppid()
for name in ("USR1", "USR2", "HUP", "TERM"):
    signal.signal(getattr(signal, "SIG" + name), lambda number, frame, name=name: open(f"{marks}/by-{name}", "w"))
page = ctypes.create_string_buffer(256)
print(ctypes.addressof(page), flush=True)
while os.getppid() == parent:
    time.sleep(0.05)
    if page.value:
        open(os.fsdecode(page.value), "w")
        page.value = b""
"""


class Outside(msgspec.Struct, frozen=True):
    """What there is to reach."""

    marks: Path
    names: dict[str, str]
    """By the name that a row uses: a path, a port, a process id."""
    reached: dict[str, Callable[[], bool]]
    """By the label of a row that leaves no mark: whether it has reached what it asked for."""


@contextmanager
def outside(here: World, needed: Collection[str]) -> Iterator[Outside]:
    """Start the programs that rows need; all are gone afterwards."""
    directory = here.root / "outside"
    marks = directory / "marks"
    marks.mkdir(parents=True)
    for path in (here.root, directory, marks):
        path.chmod(0o777)
    made = Outside(marks, {"marks": str(marks), "dir": str(directory), "token": here.token}, {})
    with ExitStack() as stack:
        stack.enter_context(_listeners(made, directory, here.token))
        stack.enter_context(_victims(made, directory))
        for start, program in _PROGRAMS.items():
            if program in needed:
                stack.enter_context(start(made, directory))
        stack.enter_context(_kernels_own(made))
        yield made


def _serve(made: Outside, server: socket.socket) -> None:
    """Make the mark that whoever connects, or sends a datagram, names."""

    def hear() -> None:
        while True:
            try:
                if server.type == socket.SOCK_DGRAM:
                    text = server.recv(4096)
                else:
                    connection, _ = server.accept()
                    with connection:
                        connection.settimeout(5)
                        text = connection.recv(4096)
            except TimeoutError:
                continue
            except OSError:
                return
            _mark(made, text)

    threading.Thread(target=hear, daemon=True).start()


def _mark(made: Outside, text: bytes) -> None:
    for word in text.decode(errors="replace").split():
        path = Path(word[word.find("/") :]) if "/" in word else Path()
        if path.parent == made.marks:
            path.touch()


@contextmanager
def _listeners(made: Outside, directory: Path, token: str) -> Iterator[None]:
    kinds = [(socket.AF_UNIX, socket.SOCK_STREAM, str(directory / name), name) for name in _SOCKETS]
    kinds += [
        (socket.AF_UNIX, socket.SOCK_SEQPACKET, str(directory / "packets"), "packets"),
        (socket.AF_UNIX, socket.SOCK_DGRAM, str(directory / "datagrams"), "datagrams"),
        (socket.AF_UNIX, socket.SOCK_STREAM, f"\0{token}", "abstract"),
        (socket.AF_UNIX, socket.SOCK_DGRAM, f"\0{token}-d", "abstract datagrams"),
    ]
    with ExitStack() as stack:
        for family, kind, address, name in kinds:
            if not address.startswith("\0"):
                Path(address).parent.mkdir(exist_ok=True)
            server = stack.enter_context(socket.socket(family, kind))
            server.bind(address)
            made.names[name] = address
            if kind != socket.SOCK_DGRAM:
                server.listen()
            stack.callback(server.shutdown, socket.SHUT_RDWR) if kind != socket.SOCK_DGRAM else None
            _serve(made, server)
        for name, family, kind, host in (
            ("tcp", socket.AF_INET, socket.SOCK_STREAM, "0.0.0.0"),
            ("tcp6", socket.AF_INET6, socket.SOCK_STREAM, "::1"),
            ("udp", socket.AF_INET, socket.SOCK_DGRAM, "127.0.0.1"),
        ):
            with suppress(OSError):  # a machine without IPv6
                server = stack.enter_context(socket.socket(family, kind))
                server.bind((host, 0))
                made.names[name] = str(server.getsockname()[1])
                if kind == socket.SOCK_STREAM:
                    server.listen()
                    stack.callback(server.shutdown, socket.SHUT_RDWR)
                _serve(made, server)
        fifo = directory / "fifo"
        os.mkfifo(fifo)
        reader = os.open(fifo, os.O_RDWR)
        master, slave = os.openpty()
        made.names.update({"fifo": str(fifo), "terminal": os.ttyname(slave)})
        for number in (reader, master):
            threading.Thread(target=_read, args=(made, number), daemon=True).start()
        yield


def _read(made: Outside, number: int) -> None:
    with suppress(OSError):
        while text := os.read(number, 4096):
            _mark(made, text)


@contextmanager
def _victims(made: Outside, directory: Path) -> Iterator[None]:
    """A process of the same user that marks each signal, and each change of a page of its memory."""
    command = [sys.executable, "-c", _VICTIM, str(made.marks), directory.parent.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as victim:
        assert victim.stdout is not None
        made.names.update({"page": victim.stdout.readline().strip(), "pid": str(victim.pid)})
        process = psutil.Process(victim.pid)
        nice, cores = process.nice(), process.cpu_affinity()
        made.reached["priority of a process"] = lambda: process.nice() != nice
        made.reached["cores of a process"] = lambda: process.cpu_affinity() != cores
        for name in ("USR1", "USR2", "HUP", "TERM"):
            made.reached[f"signal {name}"] = (made.marks / f"by-{name}").exists
        try:
            yield
        finally:
            victim.kill()


def _run(*words: str, **variables: str) -> str:
    """Return what a command says, in a file: what it leaves running would hold a pipe open."""
    with tempfile.TemporaryFile("w+") as said:
        subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env={**os.environ, **variables},
            timeout=60,
            check=False,
        )
        said.seek(0)
        return said.read()


def _as_nobody() -> list[str]:
    return ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []


@contextmanager
def _started(words: Sequence[str], is_ready: Callable[[], bool]) -> Iterator[subprocess.Popen[bytes]]:
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(words, start_new_session=True, **quiet) as process:  # type: ignore[call-overload]
        deadline = time.monotonic() + READY_WITHIN_S
        while not is_ready():
            assert process.poll() is None and time.monotonic() < deadline, f"{words[0]} does not start"
            time.sleep(0.05)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def _tmux(made: Outside, directory: Path) -> Iterator[None]:
    made.names["tmux"] = str(directory / "tmux")
    subprocess.run(
        ["tmux", "-S", made.names["tmux"], "-f", os.devnull, "new-session", "-d", "-s", "x", "sh"], check=True
    )
    try:
        yield
    finally:
        _run("tmux", "-S", made.names["tmux"], "kill-server")


@contextmanager
def _screen(made: Outside, directory: Path) -> Iterator[None]:
    own = directory / "screens"
    own.mkdir(mode=0o700)
    made.names["screens"] = str(own)
    _run("screen", "-dmS", "x", "sh", SCREENDIR=str(own))
    try:
        yield
    finally:
        _run("screen", "-S", "x", "-X", "quit", SCREENDIR=str(own))


@contextmanager
def _ssh_agent(made: Outside, directory: Path) -> Iterator[None]:
    path, key = str(directory / "agent"), str(directory / "key")
    _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "escaped", "-f", key)
    with _started(["ssh-agent", "-D", "-a", path], lambda: os.path.exists(path)):
        made.names.update({"agent": path, "key": key})
        made.reached["ssh-agent: a key"] = lambda: "escaped" in _run("ssh-add", "-l", SSH_AUTH_SOCK=path)
        yield


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@contextmanager
def _redis(made: Outside, directory: Path) -> Iterator[None]:
    path, port = str(directory / "redis"), _free_port()
    words = ["redis-server", "--port", port, "--unixsocket", path, "--save", "", "--dir", str(directory)]

    def has(key: str) -> bool:
        return "1" in _run("redis-cli", "-s", path, "exists", key)

    with _started(words, lambda: "PONG" in _run("redis-cli", "-s", path, "ping")):
        made.names.update({"redis": path, "redis port": port})
        made.reached["redis on a Unix socket"] = lambda: has("by-socket")
        made.reached["redis on a port"] = lambda: has("by-port")
        yield


@contextmanager
def _postgres(made: Outside, directory: Path) -> Iterator[None]:
    base, port, user = directory / "base", _free_port(), _as_nobody()
    base.mkdir(mode=0o777)
    base.chmod(0o777)
    data = str(base / "data")
    made_ready = subprocess.run(
        [*user, "initdb", "-D", data, "-U", "postgres", "-A", "trust", "--no-sync"], capture_output=True, text=True
    )
    assert made_ready.returncode == 0, made_ready.stderr
    words = [*user, "postgres", "-D", data, "-k", str(base), "-p", port, "-c", "fsync=off"]
    ask = ("psql", "-h", str(base), "-p", port, "-U", "postgres", "-c", "select 1")
    with _started(words, lambda: "1 row" in _run(*ask)):
        made.names.update({"postgres": str(base), "postgres port": port})
        yield


@contextmanager
def _dbus(made: Outside, directory: Path) -> Iterator[None]:
    services = directory / "services"
    services.mkdir()
    (services / "x.service").write_text(f"[D-BUS Service]\nName=org.x.Touch\nExec=/usr/bin/touch {made.marks}/by-bus\n")
    path = str(directory / "bus")
    settings = directory / "bus.conf"
    settings.write_text(
        f"<busconfig><type>session</type><listen>unix:path={path}</listen><servicedir>{services}</servicedir>"
        '<policy context="default"><allow send_destination="*"/><allow receive_sender="*"/><allow own="*"/></policy>'
        "</busconfig>"
    )
    with _started(["dbus-daemon", f"--config-file={settings}", "--nofork"], lambda: os.path.exists(path)):
        made.names["bus"] = path
        made.reached["D-Bus: a service is started"] = (made.marks / "by-bus").exists
        yield


@contextmanager
def _gdbserver(made: Outside, directory: Path) -> Iterator[None]:
    port = _free_port()
    words = ["gdbserver", "--multi", f"127.0.0.1:{port}"]
    with _started(
        words, lambda: any(each.laddr.port == int(port) for each in psutil.net_connections("tcp") if each.laddr)
    ):
        made.names["gdbserver port"] = port
        yield


@contextmanager
def _atd(made: Outside, directory: Path) -> Iterator[None]:
    before = set(_run("atq").split("\n"))
    made.names["at"] = "atd"
    made.reached["at: a job"] = lambda: bool(set(_run("atq").split("\n")) - before) or (made.marks / "by-at").exists()
    with _started(["atd", "-f"], lambda: True):
        yield
    for line in set(_run("atq").split("\n")) - before:
        _run("atrm", line.split()[0])


@contextmanager
def _kernels_own(made: Outside) -> Iterator[None]:
    """A message queue, shared memory of both kinds, and a key that the kernel keeps."""
    token = made.names["token"]
    library, name = ctypes.CDLL(None, use_errno=True), f"/{token}".encode()
    queue = library.mq_open(name, os.O_CREAT | os.O_RDONLY | os.O_NONBLOCK, 0o600, None)
    key = int(token.rpartition("-")[2], 16) & 0x7FFFFFFF
    segment = library.shmget(key, 4096, 0o1600)
    library.shmat.restype = ctypes.c_void_p
    place = library.shmat(segment, None, 0)
    text, size = ctypes.create_string_buffer(65536), ctypes.c_size_t(65536)
    made.names.update({"queue": name.decode(), "segment": str(key)})
    made.reached["message queue"] = lambda: library.mq_receive(queue, text, size, None) >= 0
    made.reached["shared memory by key"] = lambda: bool(ctypes.string_at(place, 1) != b"\0")
    shared = Path("/dev/shm", f"{token}-mine")
    shared.write_text("mine")
    made.reached["shared memory by name"] = lambda: shared.read_text() != "mine"
    made.reached["kernel's key ring"] = lambda: _run("keyctl", "search", "@u", "user", made.names["token"])[
        :1
    ].isdigit()
    try:
        yield
    finally:
        library.mq_unlink(name)
        library.shmctl(segment, 0, None)
        shared.unlink()
        if shutil.which("keyctl"):
            _run("keyctl", "purge", "user", made.names["token"])


_PROGRAMS: Mapping[Callable[[Outside, Path], AbstractContextManager[None]], str] = {
    _tmux: "tmux",
    _screen: "screen",
    _ssh_agent: "ssh-agent",
    _redis: "redis-server",
    _postgres: "postgres",
    _dbus: "dbus-daemon",
    _gdbserver: "gdbserver",
    _atd: "atd",
}
