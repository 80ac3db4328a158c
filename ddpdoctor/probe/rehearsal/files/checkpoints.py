"""How checkpoints are loaded: onto which device, and whether the names of the parameters fit."""

from __future__ import annotations

import functools
import os
import sys
from types import FrameType
from typing import Any

from ...call_listeners import on_call
from ...journal import Journal
from .real_paths import target_path

NOTED = 200
PREFIX = "module."


class Checkpoints:
    """Patches of ``torch.load``, of its look-up of each storage's place, and of ``Module.load_state_dict``."""

    def __init__(self, journal: Journal, torch: Any) -> None:
        self._journal = journal
        self._torch = torch
        self._noted = 0
        self._saved_on: set[str] = set()
        """Where the storages of the load that is going on were saved."""

    def install(self) -> None:
        """Replace the functions in the modules that users and torch take them from."""
        serialization = self._torch.serialization
        on_call(
            self._journal, serialization, "default_restore_location", before=self._restores, harms=("checkpoint_loads",)
        )
        loaded = self._noted_load(serialization.load)
        self._torch.load = serialization.load = loaded
        module_class = self._torch.nn.Module
        module_class.load_state_dict = self._noted_state(module_class.load_state_dict)

    def _restores(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        location = arguments[1] if len(arguments) > 1 else options.get("location")
        if isinstance(location, str) and len(self._saved_on) < 16:
            self._saved_on.add(location)

    def _noted_load(self, load: Any) -> Any:
        @functools.wraps(load)
        def load_noted(f: Any, map_location: Any = None, *arguments: Any, **options: Any) -> Any:
            self._saved_on.clear()
            try:
                return load(f, map_location, *arguments, **options)
            finally:
                self._journal.guarded(
                    self._note_file, f, map_location is not None, sys._getframe(1), harms=("checkpoint_loads",)
                )

        return load_noted

    def _note_file(self, file: Any, mapped: bool, frame: Any) -> None:
        path = target_path(file if isinstance(file, (str, bytes, os.PathLike)) else getattr(file, "name", None))
        self._noted += 1
        if path is not None and self._noted <= NOTED:
            self._journal.event(
                "checkpoint_loaded",
                path=path,
                mapped=mapped,
                saved_on=[] if mapped else sorted(self._saved_on),
                site=self._journal.site(frame),
            )

    def _noted_state(self, load: Any) -> Any:
        @functools.wraps(load)
        def load_state_dict(module: Any, state_dict: Any, *arguments: Any, **options: Any) -> Any:
            try:
                result = load(module, state_dict, *arguments, **options)
            except RuntimeError:
                self._journal.guarded(
                    self._note_names, module, state_dict, True, sys._getframe(1), harms=("state_names",)
                )
                raise
            fits = not getattr(result, "missing_keys", None) or not getattr(result, "unexpected_keys", None)
            self._journal.guarded(
                self._note_names, module, {} if fits else state_dict, False, sys._getframe(1), harms=("state_names",)
            )
            return result

        return load_state_dict

    def _note_names(self, module: Any, given: Any, raised: bool, frame: Any) -> None:
        """Write how many names fit once the wrapper's prefix is put before them or taken away; no name where all do."""
        own = set(module.state_dict()) if given else set()
        names = {str(name) for name in given}
        without = {name[len(PREFIX) :] for name in names - own if name.startswith(PREFIX)}
        too_long, too_short = len(without & own), len({PREFIX + name for name in names - own} & own)
        self._noted += 1
        if self._noted <= NOTED:
            self._journal.event(
                "state_names",
                module_class=type(module).__qualname__,
                names=len(names),
                too_long=too_long,
                too_short=too_short,
                raised=raised,
                site=self._journal.site(frame),
            )
