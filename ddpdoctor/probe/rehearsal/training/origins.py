"""When and where each parameter came into a module, and what it is called there."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, Optional
from weakref import ReferenceType, WeakKeyDictionary, ref

from ...journal import Journal

_DEEPEST = 64


class _Origin(NamedTuple):
    parameter: ReferenceType[Any]
    moment: int
    site: int
    module: ReferenceType[Any]
    name: str


class Origins:
    """Listeners at torch's hooks of registered parameters and modules, there since torch 2.0."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._came: dict[int, _Origin] = {}
        """When a parameter first came into a module, by its identity, which a later one may have again."""
        self._above: WeakKeyDictionary[Any, tuple[ReferenceType[Any], str]] = WeakKeyDictionary()
        """The module that each module is a part of, and its name there."""
        self.moment = 0
        """Parameters that came by now."""

    def install(self) -> None:
        """Listen from here on."""
        hooks, journal = sys.modules["torch.nn.modules.module"], self._journal
        for kind, note in (("parameter", self._note_parameter), ("module", self._note_module)):
            register = getattr(hooks, f"register_module_{kind}_registration_hook", None)
            if register is not None:
                register(lambda *made, note=note: journal.guarded(note, *made, harms=("unheld_parameters",)))

    def came_after(self, parameter: Any, moment: int) -> bool:
        """Return whether a parameter came into a module after a moment; False where it was not seen to come."""
        known = self._known(parameter)
        return known is not None and known.moment > moment

    def origin_of(self, parameter: Any) -> tuple[int, str]:
        """Return the call chain that made a parameter, -1 where it is not known, and its name and model, likewise."""
        known = self._known(parameter)
        if known is None:
            return -1, ""
        path, module = [known.name], known.module()
        while module is not None and len(path) < _DEEPEST and (above := self._above.get(module)) is not None:
            owner = above[0]()
            if owner is None:
                break
            path, module = [above[1], *path], owner
        return known.site, f"{'.'.join(path)} of {type(module).__qualname__}" if module is not None else ""

    def _known(self, parameter: Any) -> Optional[_Origin]:
        known = self._came.get(id(parameter))
        return known if known is not None and known.parameter() is parameter else None

    def _note_parameter(self, module: Any, name: str, parameter: Any) -> None:
        if parameter is not None and self._known(parameter) is None:
            self.moment += 1
            site = self._journal.site(sys._getframe())
            self._came[id(parameter)] = _Origin(ref(parameter), self.moment, site, ref(module), name)

    def _note_module(self, module: Any, name: str, part: Any) -> None:
        if part is not None:
            self._above[part] = ref(module), name
