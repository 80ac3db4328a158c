"""What each key does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from ddpdoctor.tui.navigation import Navigation
from ddpdoctor.tui.screens.pages import TABS


class _Screen(Protocol):
    """What keys act on."""

    where: Navigation

    def filter_rows(self) -> None: ...
    def hold(self) -> None: ...
    def step(self, steps: int) -> None: ...
    def seek(self, by_ns: int) -> None: ...
    def speed(self, factor: float) -> None: ...
    def export(self) -> None: ...
    def take_stack(self) -> None: ...
    def dump(self) -> None: ...
    def copy_stall(self) -> None: ...
    def kill(self) -> None: ...
    def turn_tone(self) -> None: ...
    def leave(self) -> None: ...
    def action_suspend_process(self) -> None: ...


SECONDS_NS = 1_000_000_000
FAR = 1_000_000


def _going_to(page: str) -> Callable[[_Screen], None]:
    return lambda app: app.where.go(page)


KEYS: Mapping[str, Callable[[_Screen], None]] = {
    **{tab.key: _going_to(tab.page) for tab in TABS},
    "?": lambda app: app.where.go("help"),
    "enter": lambda app: app.where.open_row(),
    "escape": lambda app: app.where.back(),
    "up": lambda app: app.where.move(-1),
    "down": lambda app: app.where.move(1),
    "pageup": lambda app: app.where.move(-10),
    "pagedown": lambda app: app.where.move(10),
    "home": lambda app: app.where.move(-FAR),
    "end": lambda app: app.where.move(FAR),
    "/": lambda app: app.filter_rows(),
    "s": lambda app: app.where.sort(),
    "r": lambda app: app.where.reverse(),
    " ": lambda app: app.hold(),
    ",": lambda app: app.step(-1),
    ".": lambda app: app.step(1),
    "left": lambda app: app.seek(-10 * SECONDS_NS),
    "right": lambda app: app.seek(10 * SECONDS_NS),
    "+": lambda app: app.speed(2.0),
    "-": lambda app: app.speed(0.5),
    "e": lambda app: app.export(),
    "t": lambda app: app.take_stack(),
    "d": lambda app: app.dump(),
    "c": lambda app: app.copy_stall(),
    "k": lambda app: app.kill(),
    "b": lambda app: app.turn_tone(),
    "q": lambda app: app.leave(),
    "ctrl+z": lambda app: app.action_suspend_process(),
}
