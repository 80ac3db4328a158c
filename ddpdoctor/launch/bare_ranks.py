"""Starts the ranks of a comparison and ends them all once one has failed, as torch's launcher does, without torch.

Run as ``python -IS bare_ranks.py COUNT MARK COMMAND ...``; ``MARK`` stands for the number of the rank in the command.
The standard library alone is imported, for it is the interpreter of the user's script that runs this file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

TIME_TO_END_S = 3.0


def main(count: str, mark: str, *command: str) -> int:
    """Start the ranks and wait for them; returns 1 where one has failed."""
    running: dict[int, subprocess.Popen[bytes]] = {}
    for number in map(str, range(int(count))):
        ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), number)
        rank = subprocess.Popen([word.replace(mark, number) for word in command], env={**os.environ, **ranks})
        running[rank.pid] = rank
    failed = False
    while running:
        pid, status = os.wait()
        if running.pop(pid, None) is not None and status and not failed:
            failed = True
            _end(running)
    return int(failed)


def _end(running: dict[int, subprocess.Popen[bytes]]) -> None:
    """Ask the ranks that are left to end, and end those that do not."""
    for pid in running:
        os.kill(pid, signal.SIGTERM)
    ends_s = time.monotonic() + TIME_TO_END_S
    while running and time.monotonic() < ends_s:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if running.pop(pid, None) is None:
            time.sleep(0.05)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
