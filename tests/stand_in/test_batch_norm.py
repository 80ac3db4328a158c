"""SyncBatchNorm keeps its collectives under the stand-in and computes what it computes on GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from ddpdoctor.probe.environment import free_port


def test_statistics_and_gradients_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    """Three steps with unequal shares of the batch end with the weights and buffers of one process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.stand_in.batch_norm", str(tmp_path), str(free_port())],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    file = tmp_path / "differences.json"
    assert file.exists(), done.stderr
    differences = json.loads(file.read_text())
    assert len(differences) == 9
    assert max(differences) < 1e-9
