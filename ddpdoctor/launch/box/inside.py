"""Runs a command in the box: makes the namespaces, lays the layers, and is the first process of what it starts.

Started by ``launch.box.start`` as a program of its own, with the standard library alone. Two processes stay: one
outside the PID namespace, whom the supervisor knows, and the first one of the namespace. When that one ends, the kernel
kills every other process there, whatever sessions and environments they have given themselves.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import select
import signal
from typing import Any, NoReturn

from . import kernel, reach
from .layers import Layers
from .users import enter_user_namespace

NOT_BUILT = 125
"""Exit code when the command was not started because the box could not be built."""
_NOT_FOUND = 127
_REASONS = {
    errno.EPERM: "user namespaces or mounts are forbidden here, by AppArmor, seccomp or a setting of the kernel",
    errno.EACCES: "user namespaces or mounts are forbidden here, by AppArmor, seccomp or a setting of the kernel",
    errno.ENOSPC: "no further user namespace is allowed here (user.max_user_namespaces)",
    errno.ENOSYS: "Linux 5.12 or newer is needed",
}
"""What the kernel's answers mean to someone who wants an overlay."""


def main(plan_path: str) -> NoReturn:
    """Build the box that the plan describes and run its command; exits as the command does, 128 + N for a signal N.

    Writes one line of JSON to the plan's ``report`` descriptor before the command starts: ``{"error": …}``, or what
    the layers are. When nothing holds the other end of ``alive`` any more, everything ends.
    """
    with open(plan_path, encoding="utf-8") as file:
        plan = json.load(file)
    try:
        layers = _build(plan)
        child = os.fork()
    except OSError as error:
        _refuse(plan, error)
    if child == 0:
        _first_process(plan, layers)
    os.close(plan["report"])
    os.close(plan["alive"])
    _, status = os.waitpid(child, 0)
    os._exit(_exit_code(status))


def _build(plan: dict[str, Any]) -> Layers:
    apart = kernel.NEW_PIDS | kernel.NEW_IPC | (0 if plan["network"] else kernel.NEW_NETWORK)
    # In a network of its own it is another list.
    served = reach.served_sockets() if os.path.exists("/proc/net/unix") else ()
    privileged = _unshare_as_root(apart)
    if not privileged:
        enter_user_namespace(kernel.NEW_MOUNTS | apart, plan["places"])
    if not plan["network"]:
        reach.make_network(plan["interfaces"])
    layers = Layers(plan["layers"], privileged=privileged, keep=plan["keep"])
    layers.build(plan["shared"], plan["places"], served, plan["sockets"], names=plan["names"])
    return layers


def _unshare_as_root(apart: int) -> bool:
    """Try it without a user namespace: its users other than root could not be distinguished."""
    if os.geteuid() != 0:
        return False
    try:
        kernel.unshare(kernel.NEW_MOUNTS | apart)
    except OSError:
        return False
    return True


def _first_process(plan: dict[str, Any], layers: Layers) -> NoReturn:
    """Enter the box, start the command, take leave of every orphan, and end with the command or the supervisor."""
    try:
        layers.enter()
        os.chdir(plan["directory"])
        log = reach.open_log() if plan["logs"] else None
        kernel.give_up_powers()
        kernel.filter_calls()
        kernel.hide_from_children()
        # The one that it was started with is the machine's, whose mode root could change.
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 0)
        os.close(null)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        woken, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    except OSError as error:
        _refuse(plan, error)
    # Before the command starts: who does not listen any more wants none.
    _report(plan, {"uppers": layers.uppers, "read_only": layers.read_only, "unseen": layers.unseen})
    command = os.fork()
    if command == 0:
        _become(plan)
    listened = (plan["alive"], woken, *(() if log is None else (log,)))
    while True:
        ready, _, _ = select.select(listened, (), ())
        if log is not None and log in ready:
            reach.drain(log)
        if woken not in ready and plan["alive"] not in ready:
            continue
        if plan["alive"] in ready:
            os._exit(NOT_BUILT)  # No one holds its other end: the supervisor is gone.
        os.read(woken, 4096)
        _take_leave(command)


def _take_leave(command: int) -> None:
    """Wait for the processes that have ended; end with the command."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == command:
            os._exit(_exit_code(status))
        if pid == 0:
            return


def _become(plan: dict[str, Any]) -> NoReturn:
    """Turn into the command, in a session of its own, with the signals as a program finds them."""
    words = plan["command"]
    try:
        os.close(plan["alive"])
        os.setsid()
        # The kernel hands a dump to a program outside, unless the limit is exactly this.
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        if hard:
            resource.setrlimit(resource.RLIMIT_CORE, (1, hard))
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(words[0], words)
    except OSError as error:
        os.write(2, f"cannot start {words[0]}: {error.strerror}\n".encode("utf-8", "backslashreplace"))
        os._exit(_NOT_FOUND)


def _refuse(plan: dict[str, Any], error: OSError) -> NoReturn:
    meaning = _REASONS.get(error.errno or 0, "")
    _report(plan, {"error": f"{meaning}; {error.strerror}" if meaning else str(error.strerror or error)})
    os._exit(NOT_BUILT)


def _report(plan: dict[str, Any], content: dict[str, Any]) -> None:
    os.write(plan["report"], json.dumps(content).encode() + b"\n")
    os.close(plan["report"])


def _exit_code(status: int) -> int:
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
