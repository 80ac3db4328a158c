"""Runs a command in the box: makes the namespaces, lays the layers, and is the first process of what it starts.

Started by ``launch.box.start`` as a program of its own, with the standard library alone. Two processes stay: one
outside the PID namespace, whom the supervisor knows, and the first one of the namespace. When that one ends, the kernel
kills every other process there, whatever sessions and environments they have given themselves.
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any, NoReturn

from . import kernel
from .layers import Layers
from .users import enter_user_namespace

NOT_BUILT = 125
"""Exit code when the command was not started because the box could not be built."""
_NOT_FOUND = 127


def main(plan_path: str) -> NoReturn:
    """Build the box that the plan describes and run its command; exits as the command does, 128 + N for a signal N.

    Writes one line of JSON to the plan's ``report`` descriptor before the command starts: ``{"error": …}``, or what
    the layers are. When nothing holds the other end of ``alive`` any more, everything ends.
    """
    with open(plan_path, encoding="utf-8") as file:
        plan = json.load(file)
    try:
        layers = _build(plan)
    except OSError as error:
        _report(plan, {"error": str(error)})
        os._exit(NOT_BUILT)
    child = os.fork()
    if child == 0:
        _first_process(plan, layers)
    os.close(plan["report"])
    os.close(plan["alive"])
    _, status = os.waitpid(child, 0)
    os._exit(_exit_code(status))


def _build(plan: dict[str, Any]) -> Layers:
    apart = kernel.NEW_PIDS | kernel.NEW_IPC | (0 if plan["network"] else kernel.NEW_NETWORK)
    privileged = _unshare_as_root(apart)
    if not privileged:
        enter_user_namespace(kernel.NEW_MOUNTS | apart, plan["places"])
    if not plan["network"]:
        kernel.bring_loopback_up()
    layers = Layers(plan["layers"], privileged=privileged, keep=plan["keep"])
    layers.build(plan["shared"])
    return layers


def _unshare_as_root(apart: int) -> bool:
    """Try it without a user namespace: its users other than root could not be told apart."""
    if os.geteuid() != 0:
        return False
    try:
        kernel.unshare(kernel.NEW_MOUNTS | apart)
    except OSError:
        return False
    return True


def _first_process(plan: dict[str, Any], layers: Layers) -> NoReturn:
    """Enter the box, start the command, take leave of every orphan, and end with the command."""
    try:
        layers.enter()
        os.chdir(plan["directory"])
        kernel.give_up_administration()
        command = os.fork()
    except OSError as error:
        _report(plan, {"error": str(error)})
        os._exit(NOT_BUILT)
    if command == 0:
        _become(plan)
    _report(
        plan,
        {
            "uppers": layers.uppers,
            "read_only": layers.read_only,
            "renames_directories": layers.renames_directories,
        },
    )
    threading.Thread(target=_end_with, args=(plan["alive"],), daemon=True).start()
    while True:
        pid, status = os.wait()
        if pid == command:
            os._exit(_exit_code(status))


def _become(plan: dict[str, Any]) -> NoReturn:
    words = plan["command"]
    try:
        os.close(plan["alive"])
        os.execvp(words[0], words)
    except OSError as error:
        os.write(2, f"cannot start {words[0]}: {error.strerror}\n".encode("utf-8", "backslashreplace"))
        os._exit(_NOT_FOUND)


def _end_with(alive: int) -> NoReturn:
    """Wait until nobody holds the other end of a pipe, which means that the supervisor is gone."""
    while os.read(alive, 1):
        pass
    os._exit(NOT_BUILT)


def _report(plan: dict[str, Any], content: dict[str, Any]) -> None:
    os.write(plan["report"], json.dumps(content).encode() + b"\n")
    os.close(plan["report"])


def _exit_code(status: int) -> int:
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
