"""Python's own connections to what lies outside the job: held back by the box, or made where there is none."""

from __future__ import annotations

import os
import stat
import sys
from typing import Any, Optional

from ...journal import Journal

ADDRESSES_NOTED = 16
_RESOLVES = ("socket.getaddrinfo", "socket.gethostbyname")


def hook_network(journal: Journal) -> None:
    """Note the first hosts, ports of this machine and Unix sockets that the job asks for, and those that it serves."""
    noted: set[tuple[str, bool]] = set()
    is_open = bool(journal.plan.get("job", {}).get("network", True))

    def note(address: str, serves: bool) -> None:
        if address and (address, serves) not in noted and len(noted) < ADDRESSES_NOTED:
            noted.add((address, serves))
            place: dict[str, Any] = {}
            if not serves and (frames := journal.user_code.frames(sys._getframe(2))):
                place = {"file": frames[0][0], "line": frames[0][1]}
            journal.event("network", address=address, serves=serves, **place)

    def asked(address: Any) -> str:
        written = _written(address)
        if _is_own(address, written, "" if not is_open else journal.run_directory):
            return ""
        # The name that was resolved has been noted.
        port = written.rpartition(":")[2]
        named = is_open and isinstance(address, tuple) and any(name.endswith(f":{port}") for name, _ in noted)
        return "" if named else written

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.sendto"):
            journal.guarded(lambda: note(asked(arguments[1]), False), harms=())
        elif event in _RESOLVES:
            journal.guarded(lambda: note(_named(*arguments[:2]), False), harms=())
        elif event == "socket.bind":
            journal.guarded(lambda: note(_written(arguments[1]), True), harms=())

    sys.addaudithook(hook)


def _named(host: Any, port: Any = None) -> str:
    """Return the host that a name server is asked for; empty where it is this machine, or an address already."""
    name = os.fsdecode(host) if isinstance(host, bytes) else str(host or "")
    if _is_local(name) or ":" in name or name.replace(".", "").isdigit() or name == os.uname().nodename:
        return ""
    return f"{name}:{port}" if port else name


def _is_own(address: Any, written: str, job: str) -> bool:
    """Return whether someone of this job listens at an address; without ``job`` no one else shares its network."""
    if isinstance(address, tuple):
        inode = _listener(int(address[1])) if _is_local(str(address[0])) else ""
    elif job or _is_socket(written):
        lines = map(str.split, _text("/proc/net/unix").splitlines())
        inode = next((words[6] for words in lines if words[7:] == [written]), "")
    else:
        return True  # no socket lies there: no one was asked
    return bool(inode) and (not job or _is_held(inode, job))


def _listener(port: int) -> str:
    """Return the inode of the socket that listens on a port of this machine; empty where there is none."""
    ending = f":{port:04X}"
    lines = map(str.split, (_text("/proc/net/tcp") + _text("/proc/net/tcp6")).splitlines())
    return next((words[9] for words in lines if words[1].endswith(ending) and words[3] == "0A"), "")


def _is_held(inode: str, job: str) -> bool:
    """Return whether a process that was started with this job's run directory holds a socket."""
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                its_own = os.fsencode(job) in file.read()
            numbers = os.listdir(f"/proc/{pid}/fd") if its_own else []
        except OSError:
            continue
        if any(_link(f"/proc/{pid}/fd/{number}") == f"socket:[{inode}]" for number in numbers):
            return True
    return False


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _written(address: Any) -> str:
    if isinstance(address, tuple):
        host, port = str(address[0]), address[1]
        if _is_local(host):
            return f"127.0.0.1:{port}" if port else ""
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    path = os.fsdecode(address) if isinstance(address, (str, bytes)) else ""
    # A name without a file, which only the box's own network has.
    return "" if not path or path.startswith("\0") else os.path.abspath(path)


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def _is_local(host: Optional[str]) -> bool:
    return host in ("", None, "localhost", "0.0.0.0", "::", "::1") or str(host).startswith(("127.", "::ffff:127."))
