"""The process of ``ddpdoctor``, and of ``python -m ddpdoctor``, which is the same."""

from __future__ import annotations

import sys

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


if __name__ == "__main__":
    sys.exit(main())
