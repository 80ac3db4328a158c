"""Tests on several ranks: the pytest plugin, the warm ranks that it keeps, and what runs inside of them.

``plugin`` is loaded into every pytest of an environment that has ddpdoctor, ``on_ranks`` once a test has the mark.
``warm_process``, ``warm_rank``, ``rank``, ``hooks`` and ``modules`` run in the ranks. ``assert_equivalent`` is a
function for any test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpdoctor.testing.equivalent import assert_equivalent

__all__ = ["assert_equivalent"]


def __getattr__(name: str) -> Any:
    # The plugin is loaded into every pytest, and imports nothing that it does not need.
    if name == "assert_equivalent":
        from ddpdoctor.testing.equivalent import assert_equivalent

        return assert_equivalent
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
