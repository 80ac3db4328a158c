"""What the files around a script say of how its jobs are started."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.checks.launch import missing_rank_environment, missing_set_device
from ddpdoctor.source.script.script import LEVELS_DOWN, Script, exports, read_script

SPAWNING = """
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, world):
    dist.init_process_group("nccl", rank=rank, world_size=world)


if __name__ == "__main__":
    mp.spawn(run, args=(2,), nprocs=2)
"""
UNCHOSEN = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).cuda())
"""
MANIFEST = """
apiVersion: kubeflow.org/v1
kind: "PyTorchJob"
spec:
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      template: {{spec: {{containers: [{{resources: {{limits: {{
        nvidia.com/gpu: {gpus}
      }}}}}}]}}}}
"""


def _script(project: Path, text: str) -> Script:
    (project / "src").mkdir()
    (project / "src" / "train.py").write_text(text)
    return read_script(project / "src" / "train.py")


@pytest.mark.parametrize("line", ["export MASTER_ADDR=localhost", "    - name: MASTER_ADDR", "ENV MASTER_ADDR node"])
def test_a_readme_that_sets_the_address_answers_for_it(tmp_path: Path, line: str) -> None:
    script = _script(tmp_path, SPAWNING)
    assert [one.code for one in missing_rank_environment.in_source(script)] == ["DDP510"]
    (tmp_path / "README.md").write_text(f"# How to run\n\n```\n{line}\n```\n")
    assert not list(missing_rank_environment.in_source(script))


def test_a_readme_that_only_speaks_of_the_address_does_not(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("MASTER_ADDR has to be set; see export in the manual of the shell.\n")
    assert list(missing_rank_environment.in_source(_script(tmp_path, SPAWNING)))


@pytest.mark.parametrize(("gpus", "found"), [(1, False), (8, True)])
def test_pods_of_one_gpu_need_no_choice_of_it(tmp_path: Path, gpus: int, found: bool) -> None:
    (tmp_path / "pyproject.toml").touch()
    manifests = tmp_path / "deploy" / "kubernetes"
    manifests.mkdir(parents=True)
    (manifests / "job.yaml").write_text(MANIFEST.format(gpus=gpus))
    assert bool(list(missing_set_device.in_source(_script(tmp_path, UNCHOSEN)))) is found


def test_files_far_below_and_what_is_no_text_are_passed_over(tmp_path: Path) -> None:
    script = _script(tmp_path, SPAWNING)
    (tmp_path / "src" / "broken.sh").symlink_to(tmp_path / "nowhere")
    (tmp_path / "src" / "bytes.sh").write_bytes(b"\xff\xfe\0export")
    deep = tmp_path.joinpath("src", *("below" for _ in range(LEVELS_DOWN + 1)))
    deep.mkdir(parents=True)
    (deep / "run.sh").write_text("export MASTER_ADDR=localhost\n")
    assert not exports(script, "MASTER_ADDR")
    (deep.parent / "run.sh").write_text("export MASTER_ADDR=localhost\n")
    assert exports(script, "MASTER_ADDR")
