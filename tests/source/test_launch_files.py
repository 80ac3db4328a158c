"""What the files around a script say of how its jobs are started."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.checks.launch import deprecated_launcher, missing_rank_environment, missing_set_device
from ddpdoctor.source.projection import project
from ddpdoctor.source.queries.job_kind import is_distributed
from ddpdoctor.source.script.script import Script, exports, read_script
from ddpdoctor.source.script.written_paths import LEVELS_DOWN

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


OPTION = """
import argparse, os
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.parse_args()
print(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("gloo")
"""
OLD = "python -m torch.distributed.launch --nproc_per_node=4"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (f"{OLD} train.py", True),
        (f"method='train'\n{OLD} \\\n    $method.py --lr 0.1", True),
        (f"export SCRIPT=train.py  # or test.py\n{OLD} ${{SCRIPT}}", True),
        (f'NAME=train\nSCRIPT="$NAME.py"\n{OLD} "$SCRIPT"', True),
        (f'LAUNCH="{OLD}"\n$LAUNCH train.py', True),
        (f"DIR=src\ncd ..\n{OLD} $DIR/train.py", True),
        (f"  METHOD=train\n{OLD} ${{METHOD}}.py --name ${{METHOD}}", True),
        (f"method='test'\n{OLD} $method.py", False),
        (f"{OLD} $1.py", False),
        (f"method=train\nmethod=test\n{OLD} $method.py", False),
        ("method=train\ntorchrun --nproc_per_node=4 $method.py", False),
    ],
)
def test_a_shell_script_starts_what_its_variables_say(tmp_path: Path, lines: str, found: bool) -> None:
    script = _script(tmp_path, OPTION)
    (tmp_path / "src" / "train.sh").write_text(f"#!/bin/bash\n{lines}\n")
    assert [one.code for one in deprecated_launcher.in_source(script)] == ["DDP503"] * found


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


TRAINER = """
import lightning

lightning.Trainer(accelerator="gpu").fit(lightning.LightningModule())
"""


@pytest.mark.parametrize(
    ("name", "line", "found"),
    [
        ("run.sh", "torchrun --nproc_per_node=$DEVICES ../src/train.py --epochs 3", True),
        ("job.slurm", "srun torchrun \\\n  --nnodes 2 \\\n  --nproc-per-node 4 \\\n  src/train.py", True),
        ("README.md", "python -m torch.distributed.run --nproc_per_node gpu src/train.py", True),
        ("launch.sh", "python3 -m torch.distributed.launch --use_env --nproc_per_node=8 $ROOT/src/train.py", True),
        ("run.sh", "torchrun --nproc_per_node=1 src/train.py", False),
        ("run.sh", "torchrun --nproc_per_node=2 src/other_train.py", False),
        ("run.sh", "torchrun --nproc_per_node=2 src/train.py.old", False),
        ("run.sh", "python src/train.py", False),
        ("README.md", "Instead of torchrun, call python; train.py does the rest.", False),
    ],
)
def test_a_trainer_that_a_launcher_starts_has_ranks(tmp_path: Path, name: str, line: str, found: bool) -> None:
    (tmp_path / "pyproject.toml").touch()
    scripts = tmp_path if name == "README.md" else tmp_path / "scripts"
    scripts.mkdir(exist_ok=True)
    script = _script(tmp_path, TRAINER)
    (scripts / name).write_text(f"# How to run\n\n{line}\n")
    assert is_distributed(project(script)) is found
