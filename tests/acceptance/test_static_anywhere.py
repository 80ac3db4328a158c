"""``check --static`` where there is no Linux: without its modules, without ``fork``, without /proc."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.check_command import with_our_tree

WITHOUT_LINUX = """\
import builtins, importlib.abc, os, pathlib, signal, sys

TAKEN = {
    "fcntl", "termios", "tty", "pty", "resource", "grp", "pwd", "syslog", "curses", "_curses", "readline",
    "_posixshmem", "torch", "pynvml", "psutil", "textual",
}


class NoLinux(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in TAKEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, NoLinux())
for name in TAKEN & set(sys.modules):
    del sys.modules[name]
for name in ("fork", "forkpty", "sched_getaffinity", "memfd_create", "posix_fallocate", "geteuid", "getuid", "killpg"):
    vars(os).pop(name, None)
for name in ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGSTOP", "SIGCONT", "SIGPIPE"):
    vars(signal).pop(name, None)

from ddpdoctor.cli.main import main

sys.exit(main(sys.argv[1:]))
"""
BROKEN = "import torch.distributed as dist\ndist.init_process_group()\nif dist.get_rank() == 0:\n    dist.barrier()\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["check", "--static", "train.py"], 1),
        (["check", "--static", "--output-format", "json", "train.py"], 1),
        (["check", "--static", "--jobs", "2", "."], 1),
        (["check", "--diff", "train.py"], 1),
        (["check", "--static", "-m", "package.train"], 1),
        (["explain", "DDP301"], 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_the_source_is_read_without_what_only_linux_has(tmp_path: Path, arguments: list[str], code: int) -> None:
    for name in ("train.py", "other.py", "package/__init__.py", "package/train.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if "__init__" in name else BROKEN)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LINUX, *arguments],
        cwd=tmp_path,
        env=with_our_tree(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr == ""
    assert "DDP301" in done.stdout or "--diff" in arguments
