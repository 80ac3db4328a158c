"""What probes that could not start at all left behind."""

from __future__ import annotations

from pathlib import Path


def probe_logs(directory: Path) -> list[str]:
    """Return one text for each such process."""
    return [path.read_text(encoding="utf-8", errors="replace").strip() for path in directory.glob("probe-*.log")]
