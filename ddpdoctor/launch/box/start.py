"""Starts a command in the box, and knows its processes and layers from outside."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

import msgspec

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.launch.box.kernel import read_mountinfo, visible_mounts
from ddpdoctor.launch.pid_namespaces import numbers_of

_PROGRAM = Path(__file__).parent / "__main__.py"
BUILT_WITHIN_S = 20.0
_LAYERS = "layers"
_PLAN = "box.json"
LOOK_AGAIN_S, LONGEST_LOOK_AGAIN_S = 0.1, 2.0
"""A number that no process of the box has is looked for again after the first, then after twice as long, and so on."""
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class BoxRefused(DdpDoctorError):
    """The kernel, or a security module, allows no box here."""


class _Report(msgspec.Struct, frozen=True):
    """What the box says of itself before the command starts."""

    error: str = ""
    uppers: dict[str, str] = {}
    read_only: list[str] = []
    unseen: list[str] = []


class Box:
    """A box that was built, and the command that runs in it."""

    def __init__(self, process: subprocess.Popen[bytes], alive: int, layers: Path, report: _Report) -> None:
        self.process = process
        """The process outside whose exit code is the command's, 128 + N for a signal N."""
        self._alive = alive
        self._layers = layers
        self._report = report
        self._outer: dict[int, int] = {}
        self._looked_for: dict[int, tuple[float, float]] = {}
        """Of numbers that no process in there has: when they are looked for again, in monotonic s, and how much later
        after that."""

    @property
    def read_only(self) -> list[str]:
        """Directories that can be written to outside and in which the box lets nothing be made or changed."""
        return self._report.read_only

    @property
    def unseen(self) -> list[str]:
        """Directories in which the box may not hide the sockets of programs outside."""
        return self._report.unseen

    def outer_pid(self, pid: int) -> int | None:
        """Return the process id out here of one that calls itself ``pid`` in there; None when there is none."""
        # Numbers are used again, out here and in there.
        if pid in self._outer and _inner_pid(self._outer[pid]) == pid:
            return self._outer[pid]
        # Who asks ten times a second for those that have ended took 0.36 of a core from two ranks on two.
        again_s, wait_s = self._looked_for.get(pid, (0.0, LOOK_AGAIN_S / 2))
        if time.monotonic() < again_s:
            return None
        self._outer = dict(self._pids())
        wait_s = min(2 * wait_s, LONGEST_LOOK_AGAIN_S)
        self._looked_for[pid] = time.monotonic() + wait_s, wait_s
        if pid in self._outer:
            del self._looked_for[pid]
        return self._outer.get(pid)

    def _pids(self) -> Iterator[tuple[int, int]]:
        import psutil

        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.Error:
            return
        for child in children:
            inner = _inner_pid(child.pid)
            if inner is not None:
                yield inner, child.pid

    def end(self) -> None:
        """Let go of the box: what still runs in it is killed by the kernel."""
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1

    def written(self) -> Iterator[tuple[str, Path]]:
        """Yield the files that were written or made in the box: the path that the script knows, and where its content
        lies.

        What was deleted, directories, and what was held in memory are left out.
        """
        for upper, lower in sorted(self._report.uppers.items(), key=lambda item: item[1]):
            top = self._layers / upper
            for directory, _, names in os.walk(top):
                for name in names:
                    path = Path(directory, name)
                    # A character device stands for what was deleted.
                    if not stat.S_ISCHR(path.lstat().st_mode):
                        yield str(Path(lower) / path.relative_to(top)), path

    def keep(self, target: Path) -> dict[str, Path]:
        """Move the upper layers into ``target``, a new directory; where what was written below a directory lies now.

        Raises OSError; what was not moved by then stays where it is.
        """
        target.mkdir(mode=0o700, parents=True)
        kept = {}
        for upper, lower in sorted(self._report.uppers.items(), key=lambda item: item[1]):
            source = self._layers / upper
            if source.is_dir() and any(source.iterdir()):
                name = lower.strip("/").replace("/", "-") or "root"
                # Whole, in one rename: nothing that lies in it, no link and no read-only directory, plays a part.
                kept[lower] = target / (name if not (target / name).exists() else source.name)
                source.rename(kept[lower])
        return kept


def _inner_pid(outer: int) -> int | None:
    """Return the number of a process in the PID namespace below ours that it is in; None when in none, or gone."""
    numbers = numbers_of(outer)
    return numbers[1] if len(numbers) > 1 else None


def mount_points() -> dict[str, bool]:
    """Return where file systems are mounted out here, and whether they are read-only."""
    try:
        return {mount.point: mount.read_only for mount in visible_mounts(read_mountinfo())}
    except OSError:
        return {}


def start_in_box(
    command: list[str],
    environment: Mapping[str, str],
    directory: Path,
    run_directory: Path,
    output: IO[bytes],
    *,
    places: Iterable[Path] = (),
    network: bool = False,
    sockets: Iterable[Path] = (),
    keep: bool = False,
) -> Box:
    """Start a command in a box in which it can write to ``run_directory`` alone; raises BoxRefused, with the reason.

    ``places`` are directories in which it is likely to write: where no overlay could serve them, none is made.
    Without ``network`` it reaches its own processes only; ``sockets`` are Unix sockets outside that it may reach.
    With ``keep`` all that it writes, but for shared memory, goes to the disk.
    """
    try:
        interfaces = {} if network else _interfaces()
        plan = {
            "command": command,
            "directory": str(directory),
            "shared": str(run_directory.resolve()),
            "places": [str(directory), *map(str, places)],
            "network": network,
            "interfaces": interfaces,
            "names": None if network else _names(interfaces),
            "sockets": [str(path) for path in sockets],
            "logs": os.path.exists("/dev/log"),
            "keep": keep,
        }
        return _started(plan, environment, run_directory, output)
    except BoxRefused:
        remove_layers(run_directory)
        raise
    except OSError as error:
        remove_layers(run_directory)
        raise BoxRefused(error.strerror or str(error)) from error


def _interfaces() -> dict[str, list[str]]:
    """Return the addresses of this machine's interfaces, but for those that lead to one neighbour only."""
    import psutil

    return {
        name: [one.address for one in addresses if one.family in _FAMILIES and not one.address.startswith("fe80:")]
        for name, addresses in psutil.net_if_addrs().items()
    }


def _names(interfaces: Mapping[str, list[str]]) -> dict[str, str]:
    """Return this machine's own name with an address of it; no name server is asked, who can take half a minute."""
    addresses = [one for each in interfaces.values() for one in each if ":" not in one and not one.startswith("127.")]
    return {socket.gethostname(): addresses[0] if addresses else "127.0.0.1"}


def _started(
    content: Mapping[str, object], environment: Mapping[str, str], run_directory: Path, output: IO[bytes]
) -> Box:
    layers = run_directory / _LAYERS
    layers.mkdir(mode=0o700)
    there, here = os.pipe()
    answer, report = os.pipe()
    process = None
    try:
        try:
            plan = {**content, "layers": str(layers.resolve()), "alive": there, "report": report}
            path = run_directory / _PLAN
            path.write_text(json.dumps(plan), encoding="utf-8")
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_PROGRAM), str(path)],
                env=dict(environment),
                cwd=str(content["directory"]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(there, report),
            )
        finally:
            os.close(there)
            os.close(report)
        said = _report_of(answer)
        if said.error:
            raise BoxRefused(said.error)
        return Box(process, here, layers, said)
    except BaseException:
        os.close(here)
        if process is not None:
            process.kill()
            _wait_a_little(process)
        raise
    finally:
        os.close(answer)


def _report_of(answer: int) -> _Report:
    """Read the box's line; a disk that does not answer while it is built must not hold up the examination."""
    text, deadline_s = b"", time.monotonic() + BUILT_WITHIN_S
    while not text.endswith(b"\n"):
        ready, _, _ = select.select((answer,), (), (), max(0.0, deadline_s - time.monotonic()))
        if not ready:
            return _Report(error=f"it was not ready within {BUILT_WITHIN_S:g} s: a file system does not respond")
        block = os.read(answer, 1 << 16)
        if not block:
            return _Report(error="its first process ended before it was ready")
        text += block
    # msgspec refuses the halves of characters that stand for names which are no UTF-8.
    return msgspec.convert(json.loads(text), _Report)


def _wait_a_little(process: subprocess.Popen[bytes]) -> None:
    """Take leave of a process that was killed, unless a disk holds it."""
    try:
        process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return


def remove_layers(run_directory: Path) -> None:
    """Remove the upper layers below a run directory; what is mounted is gone with the box."""
    layers = run_directory / _LAYERS
    waiting = [layers]
    while waiting:
        directory = waiting.pop()
        # The kernel's own working directory, and what the script made so, can be listed by no one.
        try:
            _open_to_owner(directory)
            with os.scandir(directory) as entries:
                waiting += [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            continue
    shutil.rmtree(layers, ignore_errors=True)


def _open_to_owner(directory: Path) -> None:
    """Let the owner list a directory and remove from it; never through a symbolic link. Raises OSError."""
    number = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.chmod(f"/proc/self/fd/{number}", 0o700)
    finally:
        os.close(number)
