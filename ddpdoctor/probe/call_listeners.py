"""The one way to listen to calls of functions that are not ours, in a watched job and in a rehearsal alike.

The replacement passes arguments, result and exceptions on as they are, stands in no traceback, and calls its listeners
under the journal's guard. What a step calls again and again is not listened to in this way but by a replacement of its
own: see ``live/hooks.py`` for why, with the figures.
"""

from __future__ import annotations

import functools
import inspect
import sys
from types import FrameType
from typing import Any, Callable, Optional

from .journal import Journal
from .user_code import leave_no_frame

Listener = Callable[[FrameType, tuple[Any, ...], dict[str, Any]], object]
"""Takes the frame that calls, and the arguments by position and by name; of a method the object is the first."""


def on_call(
    journal: Journal,
    owner: Any,
    name: str,
    *,
    before: Optional[Listener] = None,
    after: Optional[Listener] = None,
    harms: tuple[str, ...],
) -> None:
    """Call listeners before each call of ``owner.name``, and after it has returned.

    ``harms`` is that of ``Journal.guarded``. What a listener raises that is no ``Exception``, as the end of a rehearsal
    is, reaches the caller.
    """
    function = getattr(owner, name)

    @functools.wraps(function)
    def listened_to(*arguments: Any, **options: Any) -> Any:
        if before is not None:
            journal.guarded(before, sys._getframe(1), arguments, options, harms=harms)
        try:
            result = function(*arguments, **options)
        except BaseException as error:
            leave_no_frame(error)
            raise
        if after is not None:
            journal.guarded(after, sys._getframe(1), arguments, options, harms=harms)
        return result

    setattr(owner, name, listened_to)


def named_arguments(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names, without those that are left to their defaults."""
    return {**dict(zip(inspect.signature(function).parameters, arguments)), **options}
