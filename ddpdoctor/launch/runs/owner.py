"""Which process made a run directory, on which machine: two machines, or two containers, may share one home."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Literal

import msgspec

from ddpdoctor.files.untrusted import read_untrusted

OWNER_FILE = "owner.json"
Standing = Literal["alive", "dead", "elsewhere", "unknown"]


class Owner(msgspec.Struct, frozen=True):
    """A process, such that no other one of any machine is taken for it."""

    host: str
    machine: str
    """The installation's own number; empty where it has none, as in most containers."""
    boot: str
    """Changes with every start of the machine."""
    pid_namespace: str
    """Process ids mean something in it alone."""
    pid: int
    started: str
    """When the process was started, in ticks since the machine was: ids are used again."""


def this_process() -> Owner:
    """Return the owner of what this process makes."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    pid = os.getpid()
    return Owner(
        host=socket.gethostname(),
        machine=_read("/etc/machine-id"),
        boot=_read("/proc/sys/kernel/random/boot_id"),
        pid_namespace=namespace,
        pid=pid,
        started=_started(pid),
    )


def sign(directory: Path) -> None:
    """Write who makes a run directory; raises OSError."""
    (directory / OWNER_FILE).write_bytes(msgspec.json.encode(this_process()))


def owner_of(directory: Path) -> Owner | None:
    """Return who made a run directory; None where that is not known."""
    try:
        return msgspec.convert(json.loads(read_untrusted(directory / OWNER_FILE, 1 << 16, directory)), Owner)
    except (OSError, ValueError, RecursionError):
        return None


def standing(owner: Owner | None) -> Standing:
    """Return whether an owner still runs; ``elsewhere`` when only its own machine or container can tell."""
    if owner is None:
        return "unknown"
    here = this_process()
    if owner.host != here.host:
        return "elsewhere"
    if owner.boot == here.boot:
        if owner.pid_namespace != here.pid_namespace:
            return "elsewhere"
        return "alive" if owner.started and _started(owner.pid) == owner.started else "dead"
    # The same machine after a new start, or another one of the same name.
    return "dead" if owner.machine and owner.machine == here.machine else "elsewhere"


def _started(pid: int) -> str:
    """When a process was started; empty when there is none, or it is a zombie."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in ("Z", "X") else ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
