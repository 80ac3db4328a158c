"""Keeps our own frames out of the tracebacks that users read."""

from __future__ import annotations

import sys


def leave_no_frame(error: BaseException) -> None:
    """Take the frame of the caller, which is about to raise ``error`` on, out of its traceback.

    A bare ``raise`` adds it no more from Python 3.11 on; before that Python itself puts it back.
    """
    own = error.__traceback__
    if own is not None and own.tb_frame is sys._getframe(1):
        error.__traceback__ = own.tb_next
