"""Says why a rank ended its rehearsal before it had shown enough."""

from __future__ import annotations

from pathlib import Path

from ddpdoctor.record.events import Chain, Ended
from ddpdoctor.record.model import StopReason


def ending_of(event: Ended, rank: int) -> tuple[StopReason, str]:
    """Return the reason in an event of an ending of ours, and the sentence for the user; ``rank`` is -1 for none."""
    reason, text = event.reason, event.text
    if reason in ("slow", "memory", "rendezvous"):
        return reason, text  # type: ignore[return-value]
    said = text.strip().partition("\n")[0]
    tail = f": {said}" if said else ""
    if reason in ("cut", "perhaps-cut"):
        place = _place(event.frames)
        who = f"rank {rank}" if rank >= 0 else "the script"
        return "cut", cut_sentence(place, f"{who} raised {event.type} at {place}{tail}", certain=reason == "cut")
    if reason == "stand-in":
        raised = f"rank {rank} raised {event.type}{tail}"
        return "stand-in", f"the CUDA stand-in could not serve {_place(event.frames)}: {raised}"
    if reason == "overlay":
        who = f"rank {rank}" if rank >= 0 else "the script"
        text = f"{_place(event.frames)} changes what an overlay of this user cannot cover"
        return "overlay", f"{text}: {who} raised {event.type}{tail}"
    return "", ""


def cut_sentence(place: str, raised: str, *, certain: bool) -> str:
    """Say that the script met a cut of ours, or perhaps did."""
    if certain:
        return f"{place} requests more batches from a loader than the shortened pass has"
    return f"{raised}; it came right after a pass that the rehearsal had shortened, which may be the cause"


def _place(frames: Chain) -> str:
    """File and line of the user's innermost frame, as an event has it."""
    return f"{Path(frames[0][0]).name}:{frames[0][1]}" if frames else "the script"
