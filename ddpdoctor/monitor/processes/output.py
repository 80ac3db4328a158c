"""What the ranks and their launcher printed."""

from __future__ import annotations

import re
from pathlib import Path

TAIL_BYTES = 8_000
LONGEST_LINE = 400
_EXIT_STATUS = re.compile(r"exitcode\s*:?\s*(-?\d+)\)?\s*\(?.*?pid:\s*(\d+)\)")
_LAUNCHER_NOISE = re.compile(r"^[WIE]\d{4} |^\*{5,}|torch/distributed/(run|elastic)")


def launcher_output(directory: Path) -> Path:
    """File that takes what the launcher prints, and a script that starts its own ranks."""
    return directory / "launcher.out"


def rank_outputs(directory: Path) -> Path:
    """Directory for the output of ranks that torch's launcher redirects."""
    return directory / "output"


def tail_of_rank(directory: Path, local_rank: int) -> str:
    """Return the last lines that a rank wrote: its stderr, or its stdout when that is empty."""
    for stream in ("stderr.log", "stdout.log"):
        for path in sorted(rank_outputs(directory).glob(f"*/attempt_0/{local_rank}/{stream}")):
            text = tail(path)
            if text.strip():
                return text
    return ""


def tail(path: Path) -> str:
    """Return the last lines of a file, whatever bytes are in it."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            size = file.tell()
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    whole = text if size <= TAIL_BYTES else text.partition("\n")[2]
    return "\n".join(map(_shortened, whole.split("\n")))


def _shortened(line: str) -> str:
    """Return a line that can be read; progress bars are drawn over each other in one line."""
    last = line.rstrip("\r").rpartition("\r")[2]
    return last if len(last) <= LONGEST_LINE else f"{last[: LONGEST_LINE // 2]} … {last[-LONGEST_LINE // 2 :]}"


def script_output(directory: Path) -> str:
    """Return what a script that starts its own ranks printed, without the launcher's own lines."""
    lines = tail(launcher_output(directory)).splitlines()
    return "\n".join(line for line in lines if not _LAUNCHER_NOISE.search(line))


def exit_statuses(directory: Path) -> dict[int, int]:
    """Exit status by process as torch's launcher reports it; negative for a signal."""
    statuses: dict[int, int] = {}
    for match in _EXIT_STATUS.finditer(tail(launcher_output(directory))):
        statuses[int(match[2])] = int(match[1])
    return statuses


def probe_logs(directory: Path) -> list[str]:
    """Return one text for each such process."""
    return [path.read_text(encoding="utf-8", errors="replace").strip() for path in directory.glob("probe-*.log")]
