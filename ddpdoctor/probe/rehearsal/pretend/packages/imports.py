"""Packages that are not installed: the script's own import statements get modules that stand for them."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple, Optional


class StandIn(NamedTuple):
    """What stands for a package."""

    module: Callable[[str], ModuleType]
    """Makes the module of a dotted name; raises ModuleNotFoundError for an unknown one."""
    what: str
    """What it is, as the user reads it."""


def serve_imports(
    stand_ins: Mapping[str, StandIn], is_users: Callable[[str], bool], note: Callable[[str], None]
) -> None:
    """Serve the import statements of the user's files; libraries, which test what is installed, see nothing of it."""
    load = builtins.__import__
    served: dict[str, ModuleType] = {}

    def served_as(name: str, missing: str) -> ModuleType:
        if name not in served:
            served[name] = stand_ins[missing].module(name)
        return served[name]

    def import_or_pretend(
        name: str,
        globals: Optional[Mapping[str, Any]] = None,
        locals: Optional[Mapping[str, Any]] = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        try:
            return load(name, globals, locals, fromlist, level)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            asking = str((globals or {}).get("__file__") or "")
            if level or missing not in stand_ins or not is_users(asking):
                raise
            # A module of torch may be what lacks the package: torch.utils.tensorboard.
            whole = served_as(name, missing)
            note(f"{missing} ({stand_ins[missing].what})")
            top = name.partition(".")[0]
            if fromlist:
                return whole
            return sys.modules[top] if top in sys.modules else served_as(top, missing)

    builtins.__import__ = import_or_pretend
