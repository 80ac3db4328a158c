"""Which words occur in the text of a script: what decides whether a check has anything to look for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.source.script.module import Module
    from ddpdoctor.source.script.script import Script


def mentions_any(script: Script, words: Iterable[str]) -> bool:
    """Return whether one of the words occurs anywhere in the text of a script's modules; answers are kept with it."""
    known: _Known | None = script.__dict__.get("_words")
    if known is None:
        known = script.__dict__["_words"] = _Known(script.modules)
    return any(map(known.__getitem__, words))


class _Known(dict[str, bool]):
    """Which words occur in a script; an imported module is searched once, however many scripts import it."""

    def __init__(self, modules: Sequence[Module]) -> None:
        super().__init__()
        self._entry = modules[0].text
        self._imported = modules[1:]

    def __missing__(self, word: str) -> bool:
        found = word in self._entry or (bool(self._imported) and self._is_imported(word))
        self[word] = found
        return found

    def _is_imported(self, word: str) -> bool:
        for module in self._imported:
            known: dict[str, bool] = module.__dict__.setdefault("_words", {})
            here = known.get(word)
            if here is None:
                here = known[word] = word in module.text
            if here:
                return True
        return False
