"""Which words occur in the text of a script: what decides whether a check has anything to look for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.source.script import Script


def mentions_any(script: Script, words: Iterable[str]) -> bool:
    """Tell whether one of the words occurs anywhere in the text of a script's modules; answers are kept with it."""
    known: dict[str, bool] = script.__dict__.setdefault("_words", {})
    return any(_mentions(script, word, known) for word in words)


def _mentions(script: Script, word: str, known: dict[str, bool]) -> bool:
    if word not in known:
        known[word] = any(word in module.text for module in script.modules)
    return known[word]
