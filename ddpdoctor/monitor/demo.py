"""The demo: a minute of a job of 8 ranks that never was, recorded, to see the screen without a GPU.

A healthy start, a GPU that runs hot and makes its rank late, a loader that cannot keep up, and a rank that runs out of
batches and leaves the others waiting. ``python -m tests.demo`` invents the story and writes the recording.
"""

from __future__ import annotations

import lzma
from importlib.resources import files

import msgspec

from ddpdoctor.files.source_text import hold
from ddpdoctor.monitor.replay import Replay
from ddpdoctor.monitor.snapshot import Snapshot

SCRIPT = "demo/train.py"
RECORDING = "demo.xz"
"""Beside this file: one snapshot a line, as JSON; the first line is the text of the script."""


def demo() -> Replay:
    """Return the recording, at its beginning, playing."""
    content = lzma.decompress(files("ddpdoctor.monitor").joinpath(RECORDING).read_bytes())
    script, *lines = content.splitlines()
    hold(SCRIPT, msgspec.json.decode(script, type=str).encode())
    by_moment = {msgspec.json.decode(line, type=_Moment).now_ns: line for line in lines}
    replay = Replay(list(by_moment), lambda at_ns: msgspec.json.decode(by_moment[at_ns], type=Snapshot), "demo")
    replay.seek(0)
    replay.play(1.0)
    return replay


class _Moment(msgspec.Struct):
    now_ns: int
