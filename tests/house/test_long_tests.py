"""What is left to the second half of CI is there, and the default run keeps real ranks."""

from __future__ import annotations

import re

from tests.conftest import LONG
from tests.house.test_layout import ROOT


def test_each_long_test_is_there() -> None:
    lost = []
    for name in LONG:
        file, _, function = name.partition("[")[0].partition("::")
        text = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""
        if not re.search(rf"^ *def {re.escape(function.rpartition('::')[2])}\(", text, re.MULTILINE):
            lost.append(name)
    assert lost == []
