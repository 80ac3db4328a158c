"""Files beside the job's work: logs, locks, caches."""

from __future__ import annotations

from pathlib import PurePath

_LOG_SUFFIXES = frozenset({".log", ".out", ".err", ".lock", ".pid", ".pyc", ".tmp"})


def is_incidental(path: str) -> bool:
    """Return whether a path is that of a log, a lock, a cache or a temporary file, by its name."""
    parts = PurePath(path).parts
    name = parts[-1] if parts else ""
    hidden = any(part.startswith(".") for part in parts) or "__pycache__" in parts
    return (
        hidden
        or path.startswith(("/dev/", "/proc/"))
        or PurePath(name).suffix in _LOG_SUFFIXES
        or "tfevents" in name
        or "log" in PurePath(name).stem.lower().replace("-", "_").split("_")
    )
