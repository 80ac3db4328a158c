"""What changes would make of a run as JSON, for machines: one object, schema 1; times are nanoseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ddpdoctor import __version__

if TYPE_CHECKING:
    from ddpdoctor.what_if.prediction import WhatIf

SCHEMA = 1


def render(answer: WhatIf) -> str:
    """Render as indented JSON that ends with a line feed."""
    told = {
        "schema": SCHEMA,
        "tool": {"name": "ddpdoctor", "version": __version__},
        **msgspec.to_builtins(answer),
    }
    return msgspec.json.format(msgspec.json.encode(told), indent=2).decode("utf-8") + "\n"
