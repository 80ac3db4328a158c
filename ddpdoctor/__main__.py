"""The process of ``ddpdoctor``, and of ``python -m ddpdoctor``, which is the same."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn

from ddpdoctor import __version__


def main() -> int:
    """Run the command line of the process and return the exit code; raises nothing."""
    if sys.argv[1:] == ["--version"] and sys.stdout is not None:
        # Scripts ask for it at each of their own starts: without Click it takes a fifth of the time.
        try:
            sys.stdout.write(f"ddpdoctor {__version__}\n")
            sys.stdout.flush()
        except (OSError, ValueError):
            pass  # The whole command says what is wrong with its output.
        else:
            return 0
    from ddpdoctor.cli.main import main as run
    from ddpdoctor.report.streams import flush_all

    code = run()
    flush_all()
    return code


def start() -> NoReturn:
    """Run the command line of the process and end the process with its exit code."""
    code = main()
    if threading.active_count() > 1:
        sys.exit(code)
    # To let go of each object of a source that was read takes a tenth of ``check --static``, 40 of 440 ms.
    atexit._run_exitfuncs()
    os._exit(code)


if __name__ == "__main__":
    start()
