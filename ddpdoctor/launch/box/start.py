"""Starts a command in the box, and knows its processes and layers from outside."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.launch.box.mounts import visible_mounts

_PROGRAM = Path(__file__).parent / "__main__.py"
_LAYERS = "layers"
_PLAN = "box.json"


class BoxRefused(DdpDoctorError):
    """The kernel, or a security module, allows no box here."""


class _Report(msgspec.Struct, frozen=True):
    """What the box says of itself before the command starts."""

    error: str = ""
    uppers: dict[str, str] = {}
    read_only: tuple[str, ...] = ()
    renames_directories: bool = True


class Box:
    """A box that was built, and the command that runs in it."""

    def __init__(self, process: subprocess.Popen[bytes], alive: int, layers: Path, report: _Report) -> None:
        self.process = process
        """The process outside whose exit code is the command's, 128 + N for a signal N."""
        self._alive = alive
        self._layers = layers
        self._report = report
        self._outer: dict[int, int] = {}

    @property
    def read_only(self) -> tuple[str, ...]:
        """Directories that can be written to outside and in which the box lets nothing be made or changed."""
        return self._report.read_only

    def outer_pid(self, pid: int) -> int | None:
        """The process id out here of one that calls itself ``pid`` in there; None when there is no such process."""
        if pid not in self._outer:
            self._outer |= dict(self._pids())
        return self._outer.get(pid)

    def _pids(self) -> Iterator[tuple[int, int]]:
        import psutil

        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.Error:
            return
        for child in children:
            try:
                with open(f"/proc/{child.pid}/status", encoding="utf-8", errors="replace") as file:
                    numbers = next(line for line in file if line.startswith("NSpid:")).split()[1:]
            except (OSError, StopIteration):
                continue
            if len(numbers) > 1:
                yield int(numbers[1]), child.pid

    def end(self) -> None:
        """Let go of the box: what still runs in it is killed by the kernel."""
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1

    def written(self) -> Iterator[tuple[str, Path]]:
        """The files that were written or made in the box: the path that the script knows, and where its content lies.

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

    def keep(self, target: Path) -> None:
        """Move the upper layers to ``target``, each to the place below it that it has below the root; OSError."""
        for upper, lower in sorted(self._report.uppers.items(), key=lambda item: item[1]):
            source = self._layers / upper
            if source.is_dir() and any(source.iterdir()):
                _merge(source, target / lower.lstrip("/"))


def mount_points() -> list[str]:
    """Where file systems are mounted out here: between them nothing can be renamed, in the box or out of it."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            return [mount.point for mount in visible_mounts(file.read())]
    except OSError:
        return []


def start_in_box(
    command: list[str],
    environment: Mapping[str, str],
    directory: Path,
    run_directory: Path,
    output: IO[bytes],
    *,
    places: Iterable[Path] = (),
    network: bool = True,
    keep: bool = False,
) -> Box:
    """Start a command in a box in which it can write to ``run_directory`` alone; raises BoxRefused, with the reason.

    ``places`` are directories in which it is likely to write: where no overlay could serve them, none is made.
    Without ``network`` it has the loopback interface only. With ``keep`` all that it writes, but for shared memory,
    goes to the disk.
    """
    layers = run_directory / _LAYERS
    layers.mkdir(mode=0o700)
    there, here = os.pipe()
    answer, report = os.pipe()
    plan = {
        "command": command,
        "directory": str(directory),
        "shared": str(run_directory.resolve()),
        "layers": str(layers.resolve()),
        "places": [str(directory), *map(str, places)],
        "network": network,
        "keep": keep,
        "alive": there,
        "report": report,
    }
    path = run_directory / _PLAN
    path.write_text(json.dumps(plan), encoding="utf-8")
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM), str(path)],
            env=dict(environment),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(there, report),
        )
    except OSError as error:
        os.close(here)
        os.close(answer)
        raise BoxRefused(f"{sys.executable} cannot be started: {error.strerror}") from error
    finally:
        os.close(there)
        os.close(report)
    with os.fdopen(answer, "rb") as stream:
        content = _report_of(stream.readline())
    if content.error:
        os.close(here)
        process.wait()
        remove_layers(run_directory)
        raise BoxRefused(content.error)
    return Box(process, here, layers, content)


def _report_of(line: bytes) -> _Report:
    try:
        return msgspec.json.decode(line, type=_Report)
    except msgspec.DecodeError:
        return _Report(error="its first process ended before it was built")


def remove_layers(run_directory: Path) -> None:
    """Remove the upper layers below a run directory; what is mounted is gone with the box."""

    def make_way(remove: Callable[..., Any], path: str, error: object) -> None:
        # The kernel's own working directory, and what the script made so, can be listed by nobody.
        try:
            os.chmod(os.path.dirname(path), 0o700)
            os.chmod(path, 0o700)
            shutil.rmtree(path, ignore_errors=True) if remove is not os.unlink else os.unlink(path)
        except OSError:
            return

    shutil.rmtree(run_directory / _LAYERS, onerror=make_way)


def _merge(source: Path, target: Path) -> None:
    """Move what is below ``source`` to below ``target``, where directories may be there already."""
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    for entry in list(source.iterdir()):
        mode = entry.lstat().st_mode
        if stat.S_ISDIR(mode):
            _merge(entry, target / entry.name)
        elif not stat.S_ISCHR(mode):
            shutil.move(entry, target / entry.name)
