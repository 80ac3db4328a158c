"""Files of strangers and of users, and regular expressions that are compiled late."""

from __future__ import annotations

import re
from typing import Any, AnyStr, cast


class _Expression:
    """Stands for a regular expression, and is compiled as soon as anything of it is asked for."""

    def __init__(self, expression: Any, flags: int) -> None:
        self._given = expression, flags

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # Asked once: from then on the attribute is found without coming here.
        value = self.__dict__[name] = getattr(re.compile(*self._given), name)
        return value


def regex(expression: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """Return a regular expression that is compiled when it is first used.

    Of 90 that a small script's check had compiled as modules were imported, which was a fifth of its time, it uses 30.
    """
    return cast("re.Pattern[AnyStr]", _Expression(expression, flags))
