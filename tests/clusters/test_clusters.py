"""The examples of launchers: each for real where it can be had, and the manifest of Kubernetes by its own fields."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.clusters.launchers import EXAMPLES, LAUNCHERS, Launcher, run


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_the_slow_rank_is_named_under_each_launcher(launcher: Launcher, tmp_path: Path) -> None:
    told = run(launcher, tmp_path)
    if told.skipped:
        pytest.skip(told.skipped)
    assert told.right, told


def test_each_folder_says_how_to_start_it_and_what_was_seen() -> None:
    folders = sorted(path for path in EXAMPLES.iterdir() if path.is_dir())
    assert {launcher.name for launcher in LAUNCHERS} == {path.name for path in folders} - {"kubernetes"}
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for folder in folders:
        section = page.partition(f"## {folder.name}\n")[2].partition("\n## ")[0]
        named = set(re.findall(rf"`{folder.name}/([\w.]+)`", section))
        assert named and named <= {path.name for path in folder.iterdir()}, folder.name
        assert "Seen:" in section, folder.name


def test_the_pods_of_the_manifest_run_the_same_watched_command() -> None:
    job: dict[str, Any] = yaml.safe_load((EXAMPLES / "kubernetes" / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1
    for kind in ("Master", "Worker"):
        (container,) = replicas[kind]["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # The operator sets its variables in the container of that name alone.
        assert container["command"][:2] == ["ddpdoctor", "profile"]
        (port,) = container["ports"]
        assert f"0.0.0.0:{port['containerPort']}" in container["command"]
    annotations = replicas["Master"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(port["containerPort"])
