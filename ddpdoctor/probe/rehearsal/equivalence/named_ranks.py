"""One process of a script that names its number of ranks itself: in an argument, a list of devices, a call that spawns.

Nothing says which of its values that number is. So one after the other is given as it would be for one rank, and it was
the right one where the script then makes a group of one rank; no other value changes what group it makes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any, Callable, Optional

from ...journal import Journal
from ...torch_compat import replaces
from ..rendezvous import SPAWNED_VARIABLE

VALUES_FILE = "values.jsonl"
PARSED = "argument"
"""Source of the values that arguments are parsed to."""


def as_one(value: Any, ranks: int) -> Any:
    """Return what ``value`` is for one rank where it stands for so many; None where it does not."""
    if isinstance(value, int):
        return 1 if value == ranks and not isinstance(value, bool) else None
    if isinstance(value, str):
        option, equals, text = value.rpartition("=")
        parts = text.split(",")
        if text == str(ranks):
            return f"{option}{equals}1"
        numbers = len(parts) == ranks and all(part.strip().isdigit() for part in parts)
        return f"{option}{equals}{parts[0]}" if numbers else None
    if isinstance(value, (list, tuple)) and len(value) == ranks and all(str(part).isdigit() for part in value):
        return list(value[:1])
    return None


class NamedRanks:
    """The values that may be the number of ranks, and the one that is made 1."""

    def __init__(self, journal: Journal, torch: Any, directory: str, stop: Callable[[str], object]) -> None:
        self._journal = journal
        self._torch = torch
        self._directory = directory
        self._stop = stop
        named: dict[str, Any] = journal.plan["equivalence"].get("named") or {}
        self._ranks = int(named.get("ranks", 0))
        self._chosen = str(named.get("value", ""))

    def install(self) -> None:
        """See what arguments are parsed to, and what ranks are spawned with."""

        @replaces("parse_known_args", argparse.ArgumentParser)
        def parse_as_one(parse: Any, *arguments: Any, **options: Any) -> Any:
            parsed = parse(*arguments, **options)
            self._journal.guarded(self._change, PARSED, parsed[0], harms=())
            return parsed

        spawning = sys.modules.get("torch.multiprocessing.spawn")
        if not hasattr(spawning, "start_processes"):
            return

        @replaces("start_processes", spawning, sys.modules["torch.multiprocessing"])
        def start_one(start: Any, fn: Any, args: Any = (), nprocs: int = 1, *others: Any, **options: Any) -> Any:
            if nprocs > 1:
                changed = self._journal.guarded(self._spawned, fn, args, nprocs, harms=())
                args, nprocs = args if changed is None else changed, 1
                os.environ[SPAWNED_VARIABLE] = "1"
            return start(fn, args, nprocs, *others, **options)

    def _change(self, source: str, holder: Any) -> None:
        """Note the values that an object or a dictionary holds, and change the chosen one."""
        values = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
        for name, value in list(values.items()):
            self._note(source, str(name), value)
            if self._chosen == f"{source} {name}":
                values[name] = as_one(value, self._ranks)

    def _spawned(self, function: Any, arguments: tuple[Any, ...], ranks: int) -> Optional[tuple[Any, ...]]:
        if any(_reads_number(function, ranks)):
            self._stop(f"the script spawns {ranks} ranks, a number that the ranks read from a variable of the module")
        changed = list(arguments)
        for number, value in enumerate(arguments):
            source = f"spawned {number}"
            self._note(source, "", value)
            if self._chosen == f"{source} ":
                changed[number] = as_one(value, self._ranks)
            elif not isinstance(value, (int, str, list, tuple)):
                self._change(source, value)
        return tuple(changed)

    def _note(self, source: str, name: str, value: Any) -> None:
        if self._chosen or not isinstance(value, (int, str, list, tuple)):
            return
        try:
            row = json.dumps([source, name, value])
        except (TypeError, ValueError):
            return
        with open(os.path.join(self._directory, VALUES_FILE), "a", encoding="utf-8") as file:
            file.write(row + "\n")


def _reads_number(function: Any, ranks: int) -> Iterator[bool]:
    """Yield, for each function and class beside a function, whether it reads a variable of their module with this
    number: a spawned rank has it whatever it is called with.
    """
    around = getattr(function, "__globals__", {})
    names = {name for name, value in around.items() if type(value) is int and value == ranks}
    for value in list(around.values()):
        if getattr(value, "__module__", None) == getattr(function, "__module__", ""):
            held = list(vars(value).values()) if isinstance(value, type) else [value]
            for one in held:
                code = getattr(getattr(one, "__func__", one), "__code__", None)
                if isinstance(code, CodeType):
                    yield any(names.intersection(each.co_names) for each in _nested(code))


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
