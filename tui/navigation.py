"""Where the user is: the page, the cursor and filter on each, what is opened, what is being typed."""

from __future__ import annotations

from dataclasses import replace

from ddpdoctor.tui.draw.cells import Painting
from ddpdoctor.tui.draw.table import Cursor
from ddpdoctor.tui.screens.pages import PAGES, Page

FILTER_CHARACTERS = 60
MOST_PLACES = 30
"""That Esc goes back to, one after the other."""


class Navigation:
    """Keeps it, and moves it as keys and mouse ask."""

    def __init__(self) -> None:
        self.page = "overview"
        self.opened = ""
        """Key of the rank or finding that has a page of its own."""
        self.scroll = 0
        """First line in sight on a page of text."""
        self.typing = False
        """The filter is being typed."""
        self.cursors: dict[str, Cursor] = {}
        self.filters: dict[str, str] = {}
        self._rows: tuple[str, ...] = ()
        self._been: list[tuple[str, str, int]] = []
        """Where the user has come from, the last place last: page, what was opened on it, how far it was scrolled."""
        self._page_before_stall = ""
        self._stall_seen_ns = 0

    @property
    def cursor(self) -> Cursor:
        """The cursor of the page."""
        return self.cursors.get(self.page, Cursor())

    @property
    def _here(self) -> Page:
        return PAGES[self.page]

    def painted(self, painting: Painting) -> None:
        """Learn which rows are there, and how far the page is scrolled at most."""
        self._rows = painting.rows
        if painting.rows:
            self.cursors[self.page] = replace(self.cursor, top=painting.top)
        elif self._here.scrolls:
            self.scroll = painting.top

    def go(self, page: str) -> None:
        """Show another page."""
        if page != self.page:
            self._been = [*self._been, (self.page, self.opened, self.scroll)][-MOST_PLACES:]
        self.page = page
        self.scroll = 0
        self._page_before_stall = ""

    def back(self) -> None:
        """Clear the filter of a list; otherwise go back to where the user was before."""
        if self.filters.pop(self.page, None) is None and self._been:
            self.page, self.opened, self.scroll = self._been.pop()
            self._page_before_stall = ""

    def move(self, rows: int) -> None:
        """Move the cursor, or scroll a page of text."""
        if not self._rows:
            self.scroll = max(0, self.scroll + rows)
            return
        position = self._rows.index(self.cursor.selected) if self.cursor.selected in self._rows else 0
        position = max(0, min(len(self._rows) - 1, position + rows))
        self.cursors[self.page] = replace(self.cursor, selected=self._rows[position])

    def select(self, key: str) -> None:
        """Put the cursor on a row, or open the row that it is on."""
        if self.cursor.selected == key:
            self.open_row()
        else:
            self.cursors[self.page] = replace(self.cursor, selected=key)

    def open_row(self) -> None:
        """Open the selected row on a page of its own."""
        if self._here.opens and self._rows:
            opened = self.cursor.selected if self.cursor.selected in self._rows else self._rows[0]
            self.go(self._here.opens)
            self.opened = opened

    def sort(self) -> None:
        """Sort by the next column."""
        sorts = self._here.sorts
        if sorts:
            now = sorts.index(self.cursor.sort) if self.cursor.sort in sorts else 0
            name = sorts[(now + 1) % len(sorts)]
            self.cursors[self.page] = replace(self.cursor, sort=name, descending=name != "rank", top=0)

    def sort_by(self, column: str) -> None:
        """Sort by a column, the greatest first; the second time the other way."""
        descending = not self.cursor.descending if self.cursor.sort == column else True
        self.cursors[self.page] = replace(self.cursor, sort=column, descending=descending, top=0)

    def reverse(self) -> None:
        """Turn the order around."""
        self.cursors[self.page] = replace(self.cursor, descending=not self.cursor.descending)

    def filter_rows(self) -> bool:
        """Begin to type what the rows have to contain; false where there are none to filter."""
        self.typing = bool(self._here.opens)
        return self.typing

    def type(self, key: str, printable: bool) -> None:
        """Take a key into the filter."""
        text = self.filters.get(self.page, "")
        if key == "escape":
            self.filters.pop(self.page, None)
            self.typing = False
        elif key == "enter":
            self.typing = False
        elif key == "backspace":
            self.filters[self.page] = text[:-1]
        elif printable:
            self.filters[self.page] = (text + key)[:FILTER_CHARACTERS]

    def heed_stall(self, since_ns: int | None, *, disturbing: bool) -> bool:
        """Bring up a standstill, once, and leave its page when it is over; true when it is new but would disturb."""
        if since_ns is None:
            if self.page == "stall" and self._page_before_stall:
                self.back()
            self._page_before_stall = ""
            self._stall_seen_ns = 0
            return False
        if since_ns == self._stall_seen_ns:
            return False
        self._stall_seen_ns = since_ns
        if disturbing or self.typing:
            return True
        if self.page != "stall":
            before = self.page
            self.go("stall")
            self._page_before_stall = before
        return False
