"""The methods that read a tensor's value: each waits until its GPU has done all that was queued."""

from __future__ import annotations

import functools
import sys
import time
from types import FrameType
from typing import Any, Callable, Optional

from ..journal import Journal
from ..user_code import UserCode, leave_no_frame

METHODS = ("item", "cpu", "tolist", "__bool__", "__float__", "__int__")
_PRINTING = ("/torch/_tensor_str.py", "/torch/_tensor.py")
"""The files of torch through which a tensor is printed or formatted."""
_now_ns = time.monotonic_ns


def follow_reads(
    journal: Journal,
    tensor_class: Any,
    is_watched: Callable[[], bool],
    note: Callable[[str, Any, FrameType, int], None],
) -> dict[str, tuple[Any, Any]]:
    """Pass each watched read to ``note``: its method, the tensor, the frame that reads, and how long it took.

    Return what was put in the place of each method, and what the class itself had there; None for what it inherits.
    """
    installed: dict[str, tuple[Any, Any]] = {}
    for name in METHODS:
        method = getattr(tensor_class, name, None)
        if method is not None:
            replacement = _followed(journal, name, method, is_watched, note)
            installed[name] = replacement, tensor_class.__dict__.get(name)
            setattr(tensor_class, name, replacement)
    return installed


def _followed(
    journal: Journal,
    name: str,
    method: Callable[..., Any],
    is_watched: Callable[[], bool],
    note: Callable[[str, Any, FrameType, int], None],
) -> Callable[..., Any]:
    @functools.wraps(method)
    def read(tensor: Any, *arguments: Any, **options: Any) -> Any:
        if not is_watched():
            return method(tensor, *arguments, **options)
        begun_ns = _now_ns()
        try:
            return method(tensor, *arguments, **options)
        except BaseException as error:
            leave_no_frame(error)
            raise
        finally:
            took_ns = _now_ns() - begun_ns
            journal.guarded(note, name, tensor, sys._getframe(1), took_ns, harms=("host_reads", "tensor_reads"))

    return read


def user_reader(frame: Optional[FrameType], user_code: UserCode) -> Optional[FrameType]:
    """Return the user's frame that reads a tensor at ``frame``, by printing it too; None where a library does."""
    while frame is not None and frame.f_code.co_filename.endswith(_PRINTING):
        frame = frame.f_back
    return frame if frame is not None and user_code.holds(frame.f_code.co_filename) else None
