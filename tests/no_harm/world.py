"""A user's machine in small: a tree with a script, data, a home and temporary folders, all full of old files."""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import shutil
import sqlite3
import subprocess
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import psutil

from tests.check_command import ROOT
from tests.no_harm.way import Place, Way

PLACES: tuple[Place, ...] = ("tree", "data", "home", "TMPDIR", "/tmp", "/var/tmp", "/dev/shm")
_OLD_S = 1_600_000_000
"""When the old files were last changed, so that a new time is seen."""
_MARK = "NO_HARM_WORLD"
_HELPER = "helper"
Entry = tuple[object, ...]


class World(msgspec.Struct, frozen=True):
    """One such machine."""

    root: Path
    token: str
    """In every name that is outside of ``root``, and in the command line of what is started."""
    state: Path
    """Where the doctor keeps its own."""

    @property
    def tree(self) -> Path:
        """Where the script is, and the working directory."""
        return self.root / "tree"

    @property
    def line(self) -> Path:
        """The socket on which the ranks tell what they do."""
        return self.root / "world"

    @property
    def places(self) -> dict[Place, Path]:
        """The folders that hold old files, by what they are."""
        inside = {name: self.root / str(name) for name in ("tree", "data", "home", "TMPDIR")}
        outside = {name: Path(str(name)) / self.token for name in ("/tmp", "/var/tmp", "/dev/shm")}
        return {place: (inside | outside)[place] for place in PLACES}

    @property
    def environment(self) -> dict[str, str]:
        """Of what runs here: a home and a temporary folder of its own."""
        own = {"HOME": str(self.root / "home"), "TMPDIR": str(self.root / "TMPDIR"), _MARK: self.token}
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "GIT_"))},
            **own,
            "XDG_STATE_HOME": str(self.state),
            "PYTHONPATH": str(ROOT),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "COLUMNS": "1000",
            "OMP_NUM_THREADS": "1",
        }

    def folder(self, way: Way) -> Path:
        """The folder of a row."""
        return self.places[way.place] / slug(way)

    def snapshot(self) -> dict[str, Entry]:
        """All that is here: kind, mode, owner, time, links, attributes and content by path."""
        shm = Path("/dev/shm")
        loose = [path for path in shm.iterdir() if self.token in path.name] if shm.is_dir() else []
        roots = {*self.places.values(), *loose}
        return {
            str(path): entry
            for root in roots
            for path in (root, *sorted(root.rglob("*")))
            if (entry := _entry(path)) is not None
        }

    def processes(self) -> list[psutil.Process]:
        """What was started here and still lives, by its environment, command line or working directory."""
        return [process for process in psutil.process_iter() if self._is_here(process)]

    def _is_here(self, process: psutil.Process) -> bool:
        if process.pid == os.getpid():
            return False
        signs: list[str] = []
        with suppress(psutil.Error, OSError):
            signs.append(process.environ().get(_MARK, ""))
        with suppress(psutil.Error, OSError):
            signs += process.cmdline()
        with suppress(psutil.Error, OSError):
            signs.append(process.cwd())
        with suppress(psutil.Error):
            return process.status() != psutil.STATUS_ZOMBIE and any(self.token in sign for sign in signs)
        return False

    def settled(self, seconds: float = 10.0) -> list[psutil.Process]:
        """Wait until nothing lives here any more; what does after that time."""
        deadline = time.monotonic() + seconds
        while (alive := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return alive


def slug(way: Way) -> str:
    """A short name of a row that a folder can have, none of which is the beginning of another."""
    words = "".join(letter if letter.isalnum() else "-" for letter in way.name)[:24]
    return f"{words}.{hashlib.sha256(way.label.encode()).hexdigest()[:6]}"


@contextmanager
def world() -> Iterator[World]:
    """A machine of its own, gone afterwards with all that runs on it."""
    token = f"nh-{secrets.token_hex(4)}"
    root = Path(tempfile.gettempdir()) / f"{token}-root"
    made = World(root, token, root / "state")
    try:
        for place in (root, *made.places.values()):
            place.mkdir(parents=True)
        if os.path.isdir("/dev/shm"):
            for name in ("job", "job-2"):
                Path(f"/dev/shm/{token}-{name}").write_bytes(bytes(64))
        _age(*made.places.values())
        yield made
    finally:
        for process in made.settled(0):
            with suppress(psutil.Error):
                process.kill()
        for name in os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else ():
            if token in name:
                with suppress(OSError):
                    os.unlink(f"/dev/shm/{name}")
        for place in (root, *made.places.values()):
            shutil.rmtree(place, ignore_errors=True)


def furnish(folder: Path, suffix: str = "") -> None:
    """Make a folder of old files of every kind."""
    shutil.copytree(_template(), folder, symlinks=True)
    (folder / f"old{suffix}").write_bytes(b"o" * 64)
    (folder / "hard.bin").unlink()
    os.link(folder / "old.bin", folder / "hard.bin")
    with suppress(OSError):
        os.setxattr(folder / "marked.txt", "user.mark", b"old")
    _age(folder, *folder.rglob("*"), folder.parent)


def _age(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (_OLD_S, _OLD_S), follow_symlinks=False)


@functools.cache
def _template() -> Path:
    import numpy
    import safetensors.numpy
    import torch

    folder = Path(_kept().name) / "template"
    texts = {
        "source.txt": "n",
        "old.txt": "old line\n" * 8,
        "marked.txt": "old",
        "train.log": "epoch 3\n",
        "metrics.csv": "epoch,loss\n3,0.5\n",
        "module.py": "VALUE = 1\n",
        "folder/a.txt": "a",
        "folder/deep/b.txt": "b",
        "cache/part-0.arrow": "rows",
        "runs/old/events": "events",
        "data.lock": "",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "empty").mkdir()
    (folder / "old.bin").write_bytes(bytes(8192))
    (folder / "hard.bin").touch()
    (folder / "link").symlink_to("old.txt")
    (folder / "old.txt").chmod(0o640)
    for number in range(3):
        torch.save({"epoch": number, "w": torch.zeros(4)}, folder / f"ckpt_{number}.pt")
    shutil.copy(folder / "ckpt_2.pt", folder / "last.pt")
    (folder / "latest.pt").symlink_to("ckpt_2.pt")
    numpy.save(folder / "array.npy", numpy.zeros(16))
    safetensors.numpy.save_file({"a": numpy.zeros(4)}, folder / "model.safetensors")
    with sqlite3.connect(folder / "base.db") as base:
        base.execute("create table t (x)")
        base.execute("insert into t values (1)")
    base.close()
    with zipfile.ZipFile(folder / "pack.zip", "w") as pack:
        pack.writestr("old.txt", "from the archive")
    with tarfile.open(folder / "pack.tar", "w") as archive:
        archive.add(folder / "source.txt", "old.txt")
    _repository(folder / "repository")
    return folder


def _repository(folder: Path) -> None:
    """A repository with two commits, a branch, something staged, something changed, and something untracked."""

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)

    folder.mkdir()
    if not shutil.which("git"):
        return
    git("init", "-q", "-b", "main")
    for name, value in {"user.name": "A", "user.email": "a@example.org", "gc.auto": "0"}.items():
        git("config", name, value)
    for number in range(2):
        (folder / "code.py").write_text(f"VALUE = {number}\n")
        (folder / f"file_{number}").write_text("tracked")
        git("add", ".")
        git("commit", "-q", "-m", f"commit {number}")
    git("branch", "other", "HEAD~1")
    (folder / "file_0").write_text("staged")
    git("add", "file_0")
    (folder / "file_1").write_text("changed")
    (folder / "untracked").write_text("untracked")


@functools.cache
def helper() -> str:
    """The path of the C program; empty where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return ""
    path = Path(_kept().name) / _HELPER
    subprocess.run([compiler, "-o", str(path), str(Path(__file__).with_name("helper.c"))], check=True)
    return str(path)


@functools.cache
def _kept() -> tempfile.TemporaryDirectory[str]:
    """What all worlds are made from, for as long as this process lives."""
    return tempfile.TemporaryDirectory(prefix="no-harm-", ignore_cleanup_errors=True)


def _entry(path: Path) -> Entry | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    attributes: list[tuple[str, bytes]] = []
    with suppress(OSError):
        names = os.listxattr(path, follow_symlinks=False)
        attributes = [(name, os.getxattr(path, name, follow_symlinks=False)) for name in sorted(names)]
    common = (oct(status.st_mode), status.st_uid, status.st_gid, tuple(attributes))
    if path.is_symlink():
        return (*common, status.st_mtime_ns, os.readlink(path))
    if path.is_dir():
        return (*common, status.st_mtime_ns)
    content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    return (*common, status.st_mtime_ns, status.st_ino, status.st_nlink, status.st_size, content)


def changes(before: Mapping[str, Entry], after: Mapping[str, Entry], *, directory_times: bool = True) -> dict[str, str]:
    """What became of each path that is not as it was.

    Without an overlay a file that came and went leaves its directory with a new time: ``directory_times=False``.
    """
    found = {}
    for path in before.keys() | after.keys():
        old, new = before.get(path), after.get(path)
        if old == new:
            continue
        if old is None or new is None:
            found[path] = "new" if old is None else "gone"
        elif directory_times or len(old) != 5 or len(new) != 5 or old[:4] != new[:4]:
            found[path] = "changed"
    return found
