"""Imports what torch's flight recorder needs for the frames of its entries, at a moment when nobody else imports.

The recorder imports ``torch._inductor.codecache`` when it is first asked for frames, in our thread. Where the training
thread imports torch's compiler at the same time, as DDP's constructor does in torch 2.13, Python breaks the deadlock of
the two by handing one of them a half-made module: an ImportError in the user's code.
"""

from __future__ import annotations

import _imp
import importlib
import sys
import threading
from typing import Any

_NEEDED = "torch._inductor.codecache"
_KEEPS_THE_WORLD = "torch.distributed.nn.functional"
"""Its functions have the default group of the moment of its import as a default argument: what is imported later, as by
``_NEEDED``, keeps that group beyond its destruction, and with it the server of its store. It takes 3 ms."""
_IMPORTING = "<frozen importlib._bootstrap>"
_failed = False


def before_the_world(torch: Any) -> None:
    """Import, before there is a default group, what would keep it for good."""
    if not torch.distributed.is_initialized():
        importlib.import_module(_KEEPS_THE_WORLD)


def ready() -> bool:
    """Tell whether the recorder may be asked; imports what it needs first, unless another thread is importing."""
    global _failed
    module = sys.modules.get(_NEEDED)
    if _failed or (module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)):
        return True
    # As long as this lock is held no thread begins to import what is not there yet; our own thread may.
    _imp.acquire_lock()
    try:
        if _somebody_imports():
            return False
        importlib.import_module(_NEEDED)
    except Exception:
        _failed = True  # A torch without its compiler: the recorder knows that itself.
    finally:
        _imp.release_lock()
    return True


def _somebody_imports() -> bool:
    """Tell whether another thread is in the midst of an import."""
    for ident, frame in sys._current_frames().items():
        inner = frame if ident != threading.get_ident() else None
        while inner is not None:
            if inner.f_code.co_filename == _IMPORTING:
                return True
            inner = inner.f_back
    return False
