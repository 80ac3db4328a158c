"""Ways to the user's files that no audit event tells of, each in a process of its own beside a real file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker, shared_memory
from typing import Any

import pytest

ATTACHED = (
    "import sqlite3; c = sqlite3.connect(':memory:'); c.execute(\"attach 'old.db' as o\"); c.execute('drop table o.t')"
)


@pytest.mark.parametrize(
    "code",
    [
        ATTACHED,
        "import sqlite3; c = sqlite3.connect('new.db'); c.execute('attach ? as o', ('old.db',))",
        "import sqlite3; c = sqlite3.connect(':memory:'); c.execute(\"vacuum into 'empty'\")",
        "import readline; readline.write_history_file('old.txt')",
        "import readline; readline.append_history_file(1, 'old.txt')",
        "import readline; readline.set_history_length(1); readline.append_history_file(0, 'old.txt')",
        "import ctypes; ctypes.CDLL(None).unlink(b'old.txt')",
        "import ctypes; ctypes.CDLL(None)['truncate'](b'old.txt', 0)",
        "import ctypes; ctypes.CDLL(None).rename(b'old.txt', b'other')",
        "import os; d = os.open('.', 0); os.open('old.txt', os.O_WRONLY | os.O_TRUNC, dir_fd=d)",
        "import os, posix; os.chdir('/'); d = posix.open(HERE, 0); posix.open('old.txt', os.O_WRONLY, dir_fd=d)",
        "import posix; posix.unlink('old.txt')",
        "import io; io.FileIO('old.txt', 'w')",
        "import _io; _io.open('old.txt', 'w')",
    ],
)
def test_nothing_happens_to_an_old_file(project: Any, code: str) -> None:
    database = project.path / "old.db"
    subprocess.run(
        [sys.executable, "-c", "import sqlite3; sqlite3.connect('old.db').execute('create table t (x)')"],
        cwd=project.path,
        check=True,
    )
    project.old({"old.txt": "o\n" * 100, "empty": ""})
    assert database.exists()
    outcome = project.rehearse(f"HERE = {str(project.path)!r}\n{code}")
    assert outcome.refusals, outcome.stderr
    project.clean()
    assert project.tree() == project.before


@pytest.mark.parametrize(
    "code",
    [
        "import sqlite3; c = sqlite3.connect('a.db'); c.execute(\"attach 'b.db' as b\"); c.execute('create table b.t (x)')",  # noqa: E501
        "import sqlite3; c = sqlite3.connect(':memory:'); c.execute(\"attach ':memory:' as b\"); c.execute('vacuum')",
        "import readline; readline.write_history_file('history'); readline.append_history_file(0, 'history')",
        "import ctypes; assert ctypes.CDLL(None).getpid() > 0",
        "from multiprocessing import shared_memory as m; s = m.SharedMemory(create=True, size=9); s.buf[0] = 1\n"
        "m.SharedMemory(s.name).close(); s.close(); s.unlink()",
    ],
)
def test_what_makes_new_files_goes_through_and_nothing_stays(allowed: Callable[..., Any], code: str) -> None:
    segments = set(os.listdir("/dev/shm"))
    allowed(code)
    assert not {name for name in set(os.listdir("/dev/shm")) - segments if name.startswith("psm_")}


def _buffer(segment: shared_memory.SharedMemory) -> memoryview:
    assert segment.buf is not None
    return segment.buf


@pytest.fixture
def segment() -> Iterator[shared_memory.SharedMemory]:
    made = shared_memory.SharedMemory(create=True, size=64)
    _buffer(made)[:4] = b"live"
    yield made
    made.close()
    made.unlink()
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]  # it is a child of the tests' process


@pytest.mark.parametrize("use", ["s.buf[:4] = b'dead'", "s.unlink()", "s.close()"])
def test_the_shared_memory_of_a_running_job_stays(project: Any, segment: shared_memory.SharedMemory, use: str) -> None:
    outcome = project.rehearse(
        f"from multiprocessing import shared_memory as m; s = m.SharedMemory({segment.name!r}); {use}"
    )
    assert [refusal.path for refusal in outcome.refusals] == [f"/dev/shm/{segment.name}"], outcome.stderr
    project.clean()
    assert bytes(_buffer(segment)[:4]) == b"live"
    assert os.path.exists(f"/dev/shm/{segment.name}")


@pytest.mark.parametrize("left", ["os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_shared_memory_that_a_rank_left_is_removed(project: Any, left: str) -> None:
    name = f"ddpdoctor_test_{os.getpid()}"
    project.rehearse(
        "import os, _posixshmem as p, mmap\n"
        f"f = p.shm_open('/{name}', os.O_CREAT | os.O_RDWR | os.O_EXCL, mode=0o600); os.ftruncate(f, 64); os.close(f)\n"
        f"open('after', 'w').close(); {left}"
    )
    assert os.path.exists(f"/dev/shm/{name}")
    project.clean()
    assert not os.path.exists(f"/dev/shm/{name}")


def test_pipes_and_files_that_had_no_name_are_removed(allowed: Callable[..., Any]) -> None:
    allowed(
        """
        import os
        os.mkfifo("pipe"); os.mknod("other", 0o10600)
        nameless = os.open(".", os.O_TMPFILE | os.O_RDWR)
        os.link(f"/proc/self/fd/{nameless}", "named", src_dir_fd=nameless)
        """.replace("\n        ", "\n")
    )


def test_functions_of_os_can_be_handed_to_other_processes(allowed: Callable[..., Any]) -> None:
    allowed("import os, pickle\nfor name in (" + repr(_HANDED_ON) + "): pickle.dumps(getattr(os, name))")


_HANDED_ON = ("open", "close", "mkdir", "symlink", "link", "rename", "replace", "truncate", "utime", "mkfifo", "remove")


def test_a_semaphore_that_a_killed_rank_left_is_removed(project: Any) -> None:
    project.rehearse(
        "import multiprocessing, os\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        "with lock: pass\n"
        "from multiprocessing import resource_tracker\n"
        "os.kill(resource_tracker._resource_tracker._pid, 9)\n"
        "open('name', 'w').write(lock._semlock.name); os._exit(0)"
    )
    name = (project.path / "name").read_text().lstrip("/")
    assert os.path.exists(f"/dev/shm/sem.{name}")
    project.clean()
    assert not os.path.exists(f"/dev/shm/sem.{name}")


def test_threads_that_write_at_once_wait_for_each_other_only_shortly(allowed: Callable[..., Any]) -> None:
    allowed(
        """
        import threading
        def write(name):
            for number in range(400):
                with open(f"{name}-{number % 7}", "a") as file:
                    file.write("x")
        threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
        for thread in threads: thread.start()
        write("main")
        for thread in threads: thread.join()
        """.replace("\n        ", "\n")
    )
