"""What an analysis of a script left out, told to whoever asks for its answers."""

from __future__ import annotations

from ddpdoctor.source.script.script import Script


def note_gap(script: Script, text: str) -> None:
    """Keep, in a sentence, that what is being answered may be incomplete."""
    script.__dict__["_gap"] = text


def take_gap(script: Script) -> str:
    """What was noted since the last call; empty when nothing was."""
    gap: str = script.__dict__.pop("_gap", "")
    return gap
