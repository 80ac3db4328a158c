"""What Python's own loggers show, and loguru's: whether a line of level INFO comes to the screen of every rank."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.memory import Memory
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    NONE,
    Arguments,
    Const,
    External,
    ExternalObject,
    SequenceValue,
    Value,
    constant,
    is_varying,
    options_of,
)

LOGGER = "logging.Logger"
_FOR_THE_SCREEN = frozenset({"logging.StreamHandler", "rich.logging.RichHandler", "colorlog.StreamHandler"})
_SETTINGS = frozenset({"setLevel", "addHandler", "setFormatter"})
# Functions that give the root logger a handler for the screen, where it has none.
_LINES = frozenset(f"logging.{name}" for name in ("debug", "info", "warning", "error", "critical", "exception", "log"))
_LOGURU = "loguru.logger"
# Those of the module logging, which costs 3 ms to import.
_LEVELS = {"NOTSET": 0, "DEBUG": 10, "INFO": 20, "WARN": 30, "WARNING": 30, "ERROR": 40, "CRITICAL": 50, "FATAL": 50}
_UNKNOWN = _LEVELS["CRITICAL"] + 1
"""Stands for a level that is not known: no line is said to be shown by it."""


def get_logger(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return the logger of a name, the same object wherever it is asked for."""
    name = constant(given.value("name", 0) or NONE)
    known = name is None or isinstance(name, str)
    key = ("logger", "" if name in (None, "root") else name) if known else ("logger", node)
    number = machine.objects.setdefault(key, machine.number())
    if known:
        machine.assign(number, "name", Const(key[1]))
    return ExternalObject(number, LOGGER)


class Screen:
    """Which loggers show lines of level INFO on the screen, on every rank alike."""

    def __init__(self, machine: Memory, calls: Iterator[Event], on_every_rank: Callable[[Event], bool]) -> None:
        self._machine = machine
        self._levels: dict[str, int] = {}
        self._handled: set[str] = set()
        self._loguru: bool | None = True
        """Loguru shows lines of level INFO on every rank; None where that cannot be known any more."""
        apart: set[int] = set()
        """Handlers that show less than INFO, or name the rank in each line."""
        added: list[tuple[str, Value]] = []
        for event in calls:
            if event.name.startswith(_LOGURU):
                self._take_loguru(event, on_every_rank)
            elif event.name == "logging.disable":
                self._levels[""] = _UNKNOWN
            elif event.name in _SETTINGS and on_every_rank(event) and event.receiver is not None:
                value = event.positional[0] if event.positional else NONE
                for option in options_of(event.receiver):
                    if not isinstance(option, ExternalObject):
                        continue
                    if event.name == "addHandler" and option.name == LOGGER:
                        added.append((self._key(option), value))
                    elif event.name == "setLevel" and option.name == LOGGER:
                        self._levels[self._key(option)] = _level(value)
                    elif (event.name == "setLevel" and _level(value) > _LEVELS["INFO"]) or (
                        event.name == "setFormatter" and self._names_process(value)
                    ):
                        apart.add(option.number)
            elif on_every_rank(event):
                self._take(event, added)
        for key, handler in added:
            shown = (one for one in options_of(handler) if isinstance(one, ExternalObject))
            if any(one.name in _FOR_THE_SCREEN and one.number not in apart for one in shown):
                self._handled.add(key)

    def _take_loguru(self, event: Event, on_every_rank: Callable[[Event], bool]) -> None:
        """Take note of what takes loguru's lines off the screen, or puts them there again on every rank."""
        does, sink = event.name.rpartition(".")[2], event.argument("sink", 0)
        if does in ("disable", "configure"):
            self._loguru = None
        elif does == "remove" and self._loguru:
            self._loguru = False
        elif does == "add" and self._loguru is False and on_every_rank(event) and "filter" not in event.named:
            on_screen = isinstance(sink, External) and sink.name in ("sys.stderr", "sys.stdout")
            level, form = (event.named.get(name, NONE) for name in ("level", "format"))
            shown = level == NONE or _level(level) <= _LEVELS["INFO"]
            self._loguru = on_screen and shown and not _shows_process(form)

    def _take(self, event: Event, added: list[tuple[str, Value]]) -> None:
        """Take note of what gives the root logger its level and its handlers."""
        if event.name == "hydra.main":  # Its default settings log to the screen and to a file.
            self._levels.setdefault("", _LEVELS["INFO"])
            self._handled.add("")
        elif event.name in _LINES:
            self._handled.add("")
        elif event.name == "logging.basicConfig" and event.complete:
            if "level" in event.named:
                self._levels[""] = _level(event.named["level"])
            handlers = event.named.get("handlers", NONE)
            if constant(event.named.get("filename", NONE)) is not None or _shows_process(
                event.named.get("format", NONE)
            ):
                self._levels[""] = _UNKNOWN
            elif isinstance(handlers, SequenceValue):
                added.extend(("", handler) for handler in handlers.values)
            else:
                self._handled.add("")

    def shows(self, event: Event) -> bool:
        """Return whether a call says something at level INFO that every rank's screen shows."""
        if event.name == f"{_LOGURU}.info":
            return bool(self._loguru)
        if event.name == "logging.info":
            return self._is_shown("")
        if event.name != "info" or event.receiver is None:
            return False
        options = [option for option in options_of(event.receiver) if option != NONE]
        return bool(options) and all(
            isinstance(option, ExternalObject) and option.name == LOGGER and self._is_shown(self._key(option), option)
            for option in options
        )

    def _is_shown(self, key: str, logger: ExternalObject | None = None) -> bool:
        chain = [*_upwards(key)]
        level = next((self._levels[one] for one in chain if one in self._levels), _LEVELS["WARNING"])
        if level > _LEVELS["INFO"]:
            return False
        for one in chain:
            if one in self._handled:
                return True
            number = (
                logger.number if logger is not None and one == key else self._machine.objects.get(("logger", one), 0)
            )
            if constant(self._machine.store.get(number, "propagate") or NONE) is False:
                return False
        return False

    def _key(self, logger: ExternalObject) -> str:
        name = constant(self._machine.store.get(logger.number, "name") or NONE)
        return name if isinstance(name, str) else f"#{logger.number}"

    def _names_process(self, formatter: Value) -> bool:
        made = self._machine.object(formatter)
        return made is None or any(map(_shows_process, made.values))


def _shows_process(value: Value) -> bool:
    """Return whether the form of a line holds the process or something else that differs by rank."""
    text = constant(value)
    return is_varying(value) or (isinstance(text, str) and ("process" in text or "rank" in text))


def _level(value: Value) -> int:
    name = value.name.rpartition(".")[2] if isinstance(value, External) else constant(value)
    level = _LEVELS.get(name.upper()) if isinstance(name, str) else name
    return level if isinstance(level, int) else _UNKNOWN


def _upwards(key: str) -> Iterator[str]:
    """Yield the name of a logger and those of the loggers above it, the root's last."""
    while key:
        yield key
        key = key.rpartition(".")[0]
    yield ""
