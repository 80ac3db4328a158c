"""Writes the recording that ``profile --demo`` plays, a snapshot a second: ``python -m tests.demo``."""

from __future__ import annotations

import lzma
from pathlib import Path

import msgspec

from ddpdoctor import monitor
from ddpdoctor.monitor.replay import RECORDING
from tests.demo.findings import CODE
from tests.demo.job import demo_snapshot
from tests.demo.story import NS

BEGAN_AT_NS = 1_700_000_000 * NS
LENGTH_S = 60

if __name__ == "__main__":
    lines = [CODE, *(demo_snapshot(second * NS, BEGAN_AT_NS) for second in range(LENGTH_S + 1))]
    content = lzma.compress(b"\n".join(map(msgspec.json.encode, lines)), preset=9)
    (Path(monitor.__path__[0]) / RECORDING).write_bytes(content)
