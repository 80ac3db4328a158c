"""Sees ranks use a group that they are no member of: torch then does nothing but warn."""

from __future__ import annotations

import functools
from typing import Any

from ...journal import Journal


def hook_non_member_calls(journal: Journal, torch: Any) -> None:
    """Note each line that calls a collective on a group which leaves this rank out; torch without the hook is left."""
    if not torch.distributed.is_available():
        return
    module = torch.distributed.distributed_c10d
    warn = getattr(module, "_warn_not_in_group", None)
    if warn is None:
        return
    noted: set[int] = set()

    def note(operation: object, site: int) -> None:
        if site not in noted:
            noted.add(site)
            journal.event("outsider_call", operation=str(operation), site=site)

    @functools.wraps(warn)
    def warn_noted(operation: object, *arguments: Any, **options: Any) -> Any:
        journal.guarded(note, operation, journal.here(), harms=("outsider_calls",))
        return warn(operation, *arguments, **options)

    module._warn_not_in_group = warn_noted
