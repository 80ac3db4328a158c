"""The stand-in serves what CUDA scripts use, wherever they use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("tier_one.py")
CASES = [
    line.removeprefix("def ").partition("(")[0]
    for before, line in zip(["", *SCRIPT.read_text().splitlines()], SCRIPT.read_text().splitlines(), strict=False)
    if before == "@case"
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What every case did in every context, in a process with the stand-in of two GPUs."""
    directory = tmp_path_factory.mktemp("run")
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.stand_in.tier_one", str(directory)],
        cwd=SCRIPT.parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, done.stderr
    return json.loads(lines[0].removeprefix("RESULTS "))  # type: ignore[no-any-return]


@pytest.mark.parametrize("context", ["main", "thread", "backward", "worker"])
@pytest.mark.parametrize("case", CASES)
def test_cuda_is_served(results: dict[str, dict[str, str]], case: str, context: str) -> None:
    assert results[context][case] == "ok"


def test_no_case_was_left_out(results: dict[str, dict[str, str]]) -> None:
    assert all(sorted(found) == sorted(CASES) for found in results.values()) and len(CASES) > 20
