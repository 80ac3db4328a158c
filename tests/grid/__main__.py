"""Prints the matrix of the grid and writes it beside this file."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.grid.judge import MATRIX, judge_all, matrix

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        text = matrix(judge_all(Path(directory)))
    MATRIX.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
