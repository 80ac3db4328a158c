"""A rehearsed rank has no terminal, and scripts that ask for its size get one."""

from __future__ import annotations

import os
import subprocess
import sys

ASKS = """
import os, sys
if "hooked" in sys.argv:
    from ddpdoctor.probe.rehearsal.surroundings import hook_terminal
    hook_terminal()
_, columns = os.popen("stty size", "r").read().split()
print(columns, os.get_terminal_size().columns, os.popen("echo other").read().strip())
"""


def asked(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ASKS, *arguments]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env={**os.environ})


def test_the_size_of_a_terminal_that_is_not_there_is_answered() -> None:
    assert asked("hooked").stdout.split() == ["80", "80", "other"]


def test_without_the_hook_the_script_fails() -> None:
    assert asked().returncode == 1
