"""What the ranks and their launcher printed."""

from __future__ import annotations

import re
from pathlib import Path

from ddpdoctor.files.untrusted import read_start

TAIL_BYTES = 8_000
LONGEST_LINE = 400
_PROBE_LOGS = 16
_OUTPUTS = 8
"""Files that are looked at: each launcher has a directory, and a script rarely starts several."""
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
        for path in sorted(rank_outputs(directory).glob(f"*/attempt_0/{local_rank}/{stream}"))[:_OUTPUTS]:
            text = tail(path, directory)
            if text.strip():
                return text
    return ""


def tail(path: Path, inside: Path | None = None) -> str:
    """Return the last lines of a file in the directory ``inside``, by default its own, whatever bytes are in it."""
    try:
        content = read_start(path, 2 * TAIL_BYTES, inside or path.parent, -TAIL_BYTES - 1)
    except OSError:
        return ""
    text = content[-TAIL_BYTES:].decode("utf-8", "replace")
    whole = text if len(content) <= TAIL_BYTES else text.partition("\n")[2]
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
    logs = sorted(directory.glob("probe-*.log"))[:_PROBE_LOGS]
    return [text.strip() for text in map(tail, logs) if text.strip()]
