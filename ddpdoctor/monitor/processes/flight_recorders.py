"""Asks the flight recorders of ranks that run now and were not started with us, where torch offers a way in.

Three ways lead there, each of which the job's owner has opened: the socket that ``TORCH_WORKER_SERVER_SOCKET`` names
(``torch.distributed.elastic.control_plane``), the debug server of ``torch.distributed.debug``, whose addresses are in
the job's store, and the pipe of NCCL (``TORCH_NCCL_DEBUG_INFO_PIPE_FILE``), on which a rank writes a dump. Both servers
are C++ threads, which answer while Python hangs. gloo has no pipe (torch 2.13).

No port is tried that is not known to be one of these: what else a rank listens on, gloo's pairs or a server of the
user's, might not bear a stranger.
"""

from __future__ import annotations

import http.client
import os
import socket
import stat
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from ddpdoctor.files.untrusted import read_start
from ddpdoctor.launch.processes import RunningRank

PATIENCE_S = 2.0
PIPE_PATIENCE_S = 4.0
"""torch 2.8 looks at the pipe once a second, and a dump of 2,000 entries takes up to one."""
LARGEST_BYTES = 64 << 20
_HANDLERS = ("dump_nccl_trace_json", "fr_trace_json")
_VALIDATE, _GET, _CHECK = 0, 3, 5
_MAGIC = 0x3C85F7CE
"""Requests of torch's TCPStore, alike from torch 2.1 to 2.13."""


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """What the flight recorder of one rank holds."""

    content: bytes = b""
    """A dump, as JSON or a pickle; empty where there is no way to it."""
    problem: str = ""
    """Why a way that should be there led nowhere, as a clause."""


def recordings(ranks: Sequence[RunningRank]) -> list[Recording]:
    """Return the recording of each rank, all of them asked at once."""
    with ThreadPoolExecutor(max_workers=32) as pool:
        return list(pool.map(_recording, ranks))


def _recording(rank: RunningRank) -> Recording:
    try:
        if path := rank.settings.get("TORCH_WORKER_SERVER_SOCKET"):
            return _of_server(_UnixConnection(path))
        if port := _debug_port(rank):
            return _of_server(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S))
        if stem := rank.settings.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE"):
            return _of_pipe(Path(f"{stem}{rank.rank}.pipe"), rank)
    except (OSError, http.client.HTTPException, struct.error, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return Recording(problem=f"its flight recorder did not answer: {reason}")
    return Recording()


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a socket of the file system."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=PATIENCE_S)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(self._path)


def _of_server(connection: http.client.HTTPConnection) -> Recording:
    """Ask for NCCL's recorder and for that of the other backends; a CPU build has the second alone."""
    best = b""
    try:
        for handler in _HANDLERS:
            connection.request("POST", f"/handler/{handler}")
            answer = connection.getresponse()
            content = answer.read(LARGEST_BYTES + 1)
            if answer.status == http.client.OK and len(content) <= LARGEST_BYTES:
                best = max(best, content, key=lambda one: (b'"record_id"' in one, len(one)))
    finally:
        connection.close()
    return Recording(content=best) if best else Recording(problem="its server has no flight recorder")


def _debug_port(rank: RunningRank) -> int | None:
    """Return the port of the rank's own debug server, if the job's store names one on which the rank listens."""
    address, port = rank.settings.get("MASTER_ADDR", ""), rank.settings.get("MASTER_PORT", "")
    listens = _open_ports(rank.pid) - ({int(port)} if port.isdecimal() else set())
    if not address or not port.isdecimal() or not listens:
        return None
    try:
        named = _ask_store(address, int(port), f"/debug_server/rank{rank.rank}")
    except OSError:
        return None  # The store is gone, or no TCPStore: nothing names a server.
    found = urlsplit(named.decode("utf-8", "replace")).port if named else None
    return found if found in listens else None


def _open_ports(pid: int) -> set[int]:
    """Ports on which a process listens for everyone, as a debug server and a store do, and gloo does not."""
    import psutil

    try:
        sockets = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.Error:
        return set()
    return {one.laddr.port for one in sockets if one.status == psutil.CONN_LISTEN and one.laddr.ip in ("::", "0.0.0.0")}


def _ask_store(address: str, port: int, key: str) -> bytes:
    """Return the value of a key in a TCPStore, if it has one; a store is asked whether it has it, and is not made to
    wait.
    """
    name = struct.pack("=Q", len(key)) + key.encode()
    with socket.create_connection((address, port), timeout=PATIENCE_S) as store:
        store.sendall(struct.pack("=BI", _VALIDATE, _MAGIC) + struct.pack("=BQ", _CHECK, 1) + name)
        if _received(store, 1) != b"\0":
            return b""
        store.sendall(struct.pack("=B", _GET) + name)
        (size,) = struct.unpack("=Q", _received(store, 8))
        return _received(store, size) if size <= 4_096 else b""


def _received(store: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        piece = store.recv(size - len(content))
        if not piece:
            raise OSError("the store closed the connection")
        content += piece
    return content


def _of_pipe(pipe: Path, rank: RunningRank) -> Recording:
    """Have NCCL write a dump, unless one would be overwritten: that is then what is read, if this job wrote it."""
    if not stat.S_ISFIFO(pipe.stat().st_mode):
        return Recording(problem=f"{pipe} is not a pipe")
    places = [Path(f"{stem}{rank.rank}") for stem in _stems(rank)]
    before = [place for place in places if place.exists()]
    if before:
        newest = max(before, key=lambda place: place.stat().st_mtime)
        if newest.stat().st_mtime < _born(rank.pid):
            return Recording(problem=f"{newest}, of an earlier job, is in the place of its dump: move it away")
        return Recording(content=_whole(newest))
    descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.write(descriptor, b"1\n")
    finally:
        os.close(descriptor)
    limit = time.monotonic() + PIPE_PATIENCE_S
    size = -1
    while time.monotonic() < limit:
        written = next((place for place in places if place.exists()), None)
        if written is not None and 0 < written.stat().st_size == size:
            return Recording(content=_whole(written))
        size = written.stat().st_size if written is not None else -1
        time.sleep(0.1)
    return Recording(problem=f"it wrote no dump after a request on {pipe}")


def _stems(rank: RunningRank) -> tuple[str, ...]:
    """Return where torch writes a dump: as it is set, or where it does by default from 2.9 on and did before."""
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        if rank.settings.get(name):
            return (rank.settings[name],)
    cache = rank.settings.get("XDG_CACHE_HOME") or f"{rank.settings.get('HOME', '')}/.cache"
    return (f"{cache}/torch/comm_lib_trace_rank_", "/tmp/nccl_trace_rank_")


def _whole(path: Path) -> bytes:
    content = read_start(path, LARGEST_BYTES + 1)
    return content if len(content) <= LARGEST_BYTES else b""


def _born(pid: int) -> float:
    import psutil

    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return 0.0
