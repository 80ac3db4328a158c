"""Runs on ranks, as a test module: the scripts of the fault table as bodies, each in a file beside it."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = json.loads((HERE / "cases.json").read_text())


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(case["script"], id=name, marks=pytest.mark.ddp(case["ranks"], case["timeout"], init=False))
        for name, case in CASES.items()
    ],
)
def test_body(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(HERE / script), run_name="__main__")
