"""Uses of a group by ranks that are no members of it: torch then does nothing but warn."""

from __future__ import annotations

from types import FrameType
from typing import Any

from ...call_listeners import on_call
from ...journal import Journal


def hook_non_member_calls(journal: Journal, torch: Any) -> None:
    """Note each line that calls a collective on a group which leaves this rank out; torch without the hook is left."""
    if not torch.distributed.is_available():
        return
    module = torch.distributed.distributed_c10d
    if not hasattr(module, "_warn_not_in_group"):
        return
    noted: set[int] = set()

    def note(frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        site = journal.site(frame)
        if site not in noted:
            noted.add(site)
            journal.event("outsider_call", operation=str(arguments[0]), site=site)

    on_call(journal, module, "_warn_not_in_group", before=note, harms=("outsider_calls",))
