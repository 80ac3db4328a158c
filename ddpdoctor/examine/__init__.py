"""``check``: a script is read, its ranks are rehearsed, and both are put together to an examination.

From Python: ``from ddpdoctor.examine import ExamineRequest, examine``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.examine.one_script import ExamineRequest as ExamineRequest
    from ddpdoctor.examine.one_script import examine as examine


def __getattr__(name: str) -> object:
    """``examine`` and its request, imported when they are first used: other modules of this room do without."""
    if name in ("ExamineRequest", "examine"):
        import importlib

        return getattr(importlib.import_module("ddpdoctor.examine.one_script"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
