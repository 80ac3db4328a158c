"""Which exceptions code may raise because a pass that it relied on was cut."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable

_OF_LESS_DATA = (ZeroDivisionError, IndexError, KeyError, AssertionError, ValueError, UnboundLocalError)
"""Exceptions of code that meets fewer batches than it counts on …"""
_SIZES = re.compile(r"must match|shape|size|dimension", re.IGNORECASE)
"""… and torch's messages then."""


def may_come_of_less_data(error: BaseException, is_users: Callable[[str], bool]) -> bool:
    """Return whether more batches might have spared the script this exception.

    They cannot where a missing key is named nowhere in the user's files but where it is looked up.
    """
    if isinstance(error, KeyError) and len(error.args) == 1 and isinstance(error.args[0], str):
        return _stands_elsewhere(error.args[0], error, is_users)
    sizes = isinstance(error, RuntimeError) and _SIZES.search(str(error))
    return bool(sizes) or isinstance(error, _OF_LESS_DATA)


def _stands_elsewhere(key: str, error: BaseException, is_users: Callable[[str], bool]) -> bool:
    failing = set()
    trace = error.__traceback__
    while trace is not None:
        failing.add((os.path.realpath(trace.tb_frame.f_code.co_filename), trace.tb_lineno))
        trace = trace.tb_next
    named = {str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())}
    files = {os.path.realpath(name) for name in named if os.path.isfile(name)} | {name for name, _ in failing}
    word = re.compile(rf"(?<!\w){re.escape(key)}(?!\w)")
    for file in filter(is_users, files):
        try:
            with open(file, encoding="utf-8", errors="replace") as source:
                lines = source.readlines()
        except OSError:
            return True
        if any(word.search(line) and (file, number) not in failing for number, line in enumerate(lines, 1)):
            return True
    return not any(map(is_users, files))
