"""Counts what DDP's search for unused parameters found, as its logger says it on some steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable, Optional
from weakref import WeakKeyDictionary

from ..journal import Journal

FIRST_NOTED_AFTER = 20
"""Looks that are told of first; after them each time that there are twice as many, and when something was unused."""


class Search:
    """The search of one DDP module."""

    __slots__ = ("looks", "told_at", "unused")

    def __init__(self) -> None:
        self.looks = 0
        self.told_at = FIRST_NOTED_AFTER
        self.unused = False


class Searches:
    """The searches of all DDP modules of a rank."""

    def __init__(self, journal: Journal, wrap_number: Callable[[Any], Optional[int]]) -> None:
        self._journal = journal
        self._wrap_number = wrap_number
        self._searches: WeakKeyDictionary[Any, Search] = WeakKeyDictionary()

    def looked(self, ddp: Any, measured: Mapping[str, Any]) -> None:
        """DDP's logger has measured a further iteration of a module."""
        size_bytes = measured.get("unused_parameter_size")
        wrap = self._wrap_number(ddp)
        if wrap is None or size_bytes is None or not ddp.find_unused_parameters or ddp.static_graph:
            return
        search = self._searches.get(ddp)
        if search is None:
            search = self._searches[ddp] = Search()
        if search.unused:
            return  # There is nothing more to learn.
        search.looks += 1
        search.unused = size_bytes != 0
        if search.unused or search.looks == search.told_at:
            search.told_at = 2 * search.looks
            self._journal.event("unused_search", wrap=wrap, looks=search.looks, found_unused=search.unused)
