"""``ddpdoctor check`` of jobs as users launch them: the scripts check for themselves that they were started so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.check_command import check, with_our_tree

MODEL = """
import torch

def make_model():
    return torch.nn.Linear(4, 1)
"""
TRAIN = """
import argparse, os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from .models.tiny import make_model
from package.models import tiny

parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", type=int, required=True)
parser.add_argument("--lr", type=float, required=True)
arguments = parser.parse_args()
assert arguments.local_rank == int(os.environ["RANK"])
assert os.environ["FLAVOUR"] == "sweet and sour" and "TAKEN" not in os.environ
assert sys.path[0] == os.getcwd() and __name__ == "__main__" and __package__ == "package"
dist.init_process_group("gloo")
assert dist.get_world_size() == 2
model = DistributedDataParallel(make_model())
optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).mean().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        dist.barrier()
dist.destroy_process_group()
"""


def test_a_module_in_a_namespace_package_under_the_old_launcher_is_rehearsed_as_it_is_launched(tmp_path: Path) -> None:
    (tmp_path / "package" / "models").mkdir(parents=True)
    (tmp_path / "package" / "models" / "tiny.py").write_text(MODEL)
    (tmp_path / "package" / "train.py").write_text(TRAIN)
    command = ["env", "-u", "TAKEN", "FLAVOUR=sweet and sour", "python", "-m", "torch.distributed.launch"]
    options = ["--nproc_per_node=8", "--nnodes", "2", "-m", "package.train", "--lr", "0.1"]
    code, report = check("--select", "DDP3", "--", *command, *options, cwd=tmp_path, TAKEN="1")
    assert report["rehearsal"]["status"] == "stopped", report["rehearsal"]
    assert (report["rehearsal"]["ranks"], report["rehearsal"]["ranks_of_job"]) == (2, 16)
    assert report["source"]["files"] == 2
    (finding,) = report["findings"]
    assert (code, finding["code"], finding["basis"]) == (1, "DDP301", ["rehearsal", "source"])
    assert finding["locations"][0]["file"] == "package/train.py"
    assert not list(tmp_path.rglob("*.pyc"))


def test_an_interpreter_that_drops_the_probe_leaves_the_rehearsal_inconclusive(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\ntorch.distributed.init_process_group('gloo')\n")
    code, report = check("--", "python", "-I", "train.py", cwd=tmp_path)
    assert code == 3
    assert report["rehearsal"]["reason"].startswith("0 of 2 ranks reported")
    assert "-I" in report["rehearsal"]["hint"]
    assert any("as by torchrun" in note for note in report["rehearsal"]["notes"])


SPAWN = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

def train(rank, world_size, url):
    if url == "env://":
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29617"
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world_size)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(12):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).mean().backward()
        optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    ranks = int(sys.argv[1])
    mp.spawn(train, args=(ranks, sys.argv[2]), nprocs=ranks)
"""


def test_rehearsals_at_the_same_time_do_not_meet_at_a_port_that_the_script_names(tmp_path: Path) -> None:
    jobs = {"2": "env://", "3": "tcp://127.0.0.1:29617"}
    (tmp_path / "train.py").write_text(SPAWN)
    command = [sys.executable, "-m", "ddpdoctor", "check", "--output-format", "json", "train.py", "--"]
    running = [
        subprocess.Popen([*command, ranks, url], cwd=tmp_path, stdout=subprocess.PIPE, env=with_our_tree())
        for ranks, url in jobs.items()
    ]
    reports = [json.loads(process.communicate(timeout=400)[0]) for process in running]
    assert [report["rehearsal"]["ranks"] for report in reports] == [2, 3]
    assert [(report["verdict"], report["findings"]) for report in reports] == [("clean", []), ("clean", [])]
