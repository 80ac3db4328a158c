"""Compares a text with a golden file beside the tests.

``DDPDOCTOR_UPDATE_GOLDEN=1 python -m pytest tests/report`` writes the files anew; read the difference first.
"""

from __future__ import annotations

import os
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden_files"


def assert_golden(name: str, text: str) -> None:
    """Fail unless ``text`` is what the golden file holds."""
    path = GOLDEN / name
    if os.environ.get("DDPDOCTOR_UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
