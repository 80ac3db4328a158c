"""Has failed comparisons on a rank explained as pytest explains them in its own process."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

INI = ("truncation_limit_lines", "truncation_limit_chars", "assertion_text_diff_style")
"""Settings that bear on explanations; which of them there are depends on the version of pytest."""


def settings_of(config: Any) -> dict[str, Any]:
    """Return what of pytest's configuration decides how a comparison is explained, as plain data."""
    known: dict[str, Any] = {}
    for name in INI:
        try:
            known[name] = config.getini(name)
        except (KeyError, ValueError):
            continue
    of_assertions = getattr(config, "get_verbosity", None)
    return {"verbosity": of_assertions("assertions") if of_assertions else config.getoption("verbose"), "ini": known}


def explain_comparisons(settings: Mapping[str, Any], modules: Iterable[str]) -> None:
    """Let pytest's own function explain, after those of the conftest files among the modules, the innermost first.

    pytest asks these functions by hooks, which a rank has none of; an explanation that fails is left out.
    """
    from _pytest import assertion
    from _pytest.assertion import truncate, util

    config: Any = _Config(settings["verbosity"], settings["ini"])
    named = (getattr(sys.modules.get(name), "pytest_assertrepr_compare", None) for name in modules)
    makers: list[Callable[..., Any]] = [*filter(None, named)][::-1]
    shorten = getattr(truncate, "truncate_if_required", None)

    def explained(op: str, left: object, right: object) -> str | None:
        for make in (*makers, assertion.pytest_assertrepr_compare):
            offered = {"config": config, "op": op, "left": left, "right": right}
            try:
                lines = make(**{name: offered[name] for name in inspect.signature(make).parameters})
                lines = shorten(lines, SimpleNamespace(config=config)) if lines and shorten is not None else lines
            except Exception:
                continue
            if lines:
                return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")
        return None

    util._reprcompare = explained
    util._config = config


class _Config:
    """What the explaining functions ask of a ``pytest.Config``."""

    pluginmanager = SimpleNamespace(has_plugin=lambda name: False)

    def __init__(self, verbosity: int, ini: Mapping[str, Any]) -> None:
        self.option = SimpleNamespace(verbose=verbosity)
        self._ini = ini

    def get_verbosity(self, kind: str | None = None) -> int:
        """Return that of assertions."""
        verbosity: int = self.option.verbose
        return verbosity

    def getoption(self, name: str, default: object = None) -> object:
        """Return the verbosity, and of other options the default."""
        return getattr(self.option, name, default)

    getvalue = getoption

    def getini(self, name: str) -> object:
        """Return a setting as pytest's own process has it."""
        return self._ini.get(name)

    def get_terminal_writer(self) -> Any:
        """Return what would highlight code, and does not: the text goes to another process."""
        return SimpleNamespace(_highlight=lambda source, lexer="python": source)
