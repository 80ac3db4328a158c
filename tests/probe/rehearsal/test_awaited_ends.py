"""Which code is prepared for the end of what it draws from."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from ddpdoctor.probe.rehearsal.data.loaders import awaits_end

PREPARED = (
    "try:\n    next(batches)\nexcept StopIteration:\n    pass",
    "try:\n    next(batches)\nexcept (KeyError, Exception):\n    pass",
    "try:\n    next(batches)\nexcept:\n    pass",
    "next(batches, None)",
    "from contextlib import suppress\nwith suppress(StopIteration):\n    next(batches)",
    "def draw():\n    return next(batches)\ntry:\n    draw()\nexcept StopIteration:\n    pass",
    "class Own:\n    __iter__ = lambda self: self\n    __next__ = lambda self: next(batches)\nfor _ in Own(): break",
    "def own():\n    yield next(batches)\nlist(own())",
)
COUNTING = (
    "next(batches)",
    "for step in range(1):\n    next(batches)",
    "try:\n    next(batches)\nexcept KeyboardInterrupt:\n    pass",
    "try:\n    next(batches)\nexcept Exception:\n    print('lost')\n    raise",
    "try:\n    raise StopIteration\nexcept StopIteration:\n    next(batches)",
    "def draw():\n    return next(batches)\ndraw()",
)


class Batches:
    """Remembers what was answered for the frame that drew."""

    def __init__(self, script: Path) -> None:
        self.answers: list[bool] = []
        self._script = str(script)

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        frame: FrameType = sys._getframe(1)
        self.answers.append(awaits_end(frame, lambda name: name == self._script))
        return 0


@pytest.mark.parametrize("source", PREPARED + COUNTING)
def test_handlers_loops_and_defaults_await_an_end(source: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(source))
    batches = Batches(script)
    exec(compile(source, str(script), "exec"), {"batches": batches})
    assert batches.answers == [source in PREPARED]
