"""ddpdoctor: a doctor for PyTorch DistributedDataParallel jobs.

This module imports nothing until it is asked for something: it is also loaded inside training processes.
"""

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """``watch`` and ``watching``, imported when they are first used."""
    if name in ("watch", "watching"):
        from ddpdoctor.probe import by_hand

        return getattr(by_hand, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
