"""The option ``--report KIND=FILE``, which writes one more report to a file and may be given again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click

from ddpdoctor.errors import UsageError

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def report_option(kinds: Sequence[str]) -> Callable[[Decorated], Decorated]:
    """Return the option, for these kinds of reports; its parameter is ``reports``."""
    return click.option(
        "--report",
        "reports",
        multiple=True,
        metavar="KIND=FILE",
        help=f"Write an additional report to a file; repeatable. KIND is one of {', '.join(kinds)}.",
    )


def kind_and_file(word: str, kinds: Sequence[str]) -> tuple[str, str]:
    """Divide what was given; raises UsageError for a kind that there is not, and without a file."""
    kind, _, path = word.partition("=")
    if kind not in kinds:
        from difflib import get_close_matches

        close = get_close_matches(kind, kinds, n=1)
        meant = f"Did you mean {close[0]}? " if close else ""
        raise UsageError(f"there is no report kind {kind!r}", f"{meant}There are {', '.join(kinds)}.")
    if not path:
        raise UsageError(f"`--report {word}` has no file name", f"Write `--report {kind}=FILE`.")
    return kind, path


def refuse_twice(names: Iterable[str]) -> None:
    """Raise UsageError where two reports would go to one file."""
    seen: set[str] = set()
    for name in names:
        real = os.path.realpath(name)
        if real in seen and not real.startswith(("/dev/", "/proc/")):
            raise UsageError(f"two reports name {name}", "Give each its own file.")
        seen.add(real)
