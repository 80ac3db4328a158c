"""Which words occur in the text of a script: what decides whether a check has anything to look for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.source.module import Module
    from ddpdoctor.source.script import Script


def mentions_any(script: Script, words: Iterable[str]) -> bool:
    """Tell whether one of the words occurs anywhere in the text of a script's modules; answers are kept with it."""
    known: dict[str, bool] = script.__dict__.setdefault("_words", {})
    for word in words:
        found = known.get(word)
        if found is None:
            found = known[word] = _occurs(script.modules, word)
        if found:
            return True
    return False


def _occurs(modules: Iterable[Module], word: str) -> bool:
    """Look in each module once, whatever the number of scripts that import it."""
    for module in modules:
        known: dict[str, bool] = module.__dict__.setdefault("_words", {})
        found = known.get(word)
        if found is None:
            found = known[word] = word in module.text
        if found:
            return True
    return False
