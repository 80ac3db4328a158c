"""Run directories of ours, one a node, alone and mixed with logs; and parameters that DDP names by their numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ddpdoctor.autopsy.dead_job import AutopsyRequest, autopsy
from ddpdoctor.examination import Examination
from ddpdoctor.finding import Finding
from ddpdoctor.source.queries.parameters import parameter_names
from ddpdoctor.source.script.script import script_at
from tests.autopsy.jobs.record import free_port

JOB = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.inner = nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU(), nn.Linear(width, width))

    def forward(self, batch):
        return self.inner(batch * self.scale)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.aux_head = nn.Linear(4, 4)
        self.block = Block(4)
        self.token = nn.Parameter(torch.zeros(4))

    def forward(self, batch):
        return self.block(self.norm(batch)) + self.token


def main():
    dist.init_process_group("gloo")
    model = DDP(Net())
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()


if __name__ == "__main__":
    if "--names" in sys.argv:
        print([name for name, _ in Net().named_parameters()])
    else:
        main()
"""


class Recorded(msgspec.Struct, frozen=True):
    """A job on two nodes with one rank each: its script, and each node's run and output."""

    script: Path
    runs: tuple[Path, Path]
    logs: tuple[Path, Path]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    home = tmp_path_factory.mktemp("recorded")
    script = home / "train.py"
    script.write_text(JOB)
    port = free_port()
    nodes = [(home / f"run{node}", home / f"node{node}.out") for node in (0, 1)]
    processes = []
    for node, (run, log) in enumerate(nodes):
        launch = (
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node),
            "--master-addr", "127.0.0.1", "--master-port", str(port), str(script),
        )  # fmt: skip
        command = (sys.executable, "-m", "ddpdoctor", "profile", "--no-tui", "--run-dir", str(run), "--", *launch)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(home / "state")}
        with log.open("wb") as output:
            processes.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))
    for process in processes:
        process.wait(timeout=240)
    return Recorded(script, (nodes[0][0], nodes[1][0]), (nodes[0][1], nodes[1][1]))


def examined(*paths: Path) -> Examination:
    return autopsy(AutopsyRequest(paths=tuple(map(str, paths))))


def causes_of(examination: Examination) -> list[Finding]:
    return [finding for finding in examination.findings if finding.role == "cause"]


def test_the_runs_of_two_nodes_are_one_job(recorded: Recorded) -> None:
    examination = examined(*recorded.runs)
    (cause,) = causes_of(examination)
    assert cause.code == "DDP201"
    assert "aux_head.weight" in cause.title + " ".join(fact.text for fact in cause.evidence)
    assert examination.autopsy is not None
    assert (examination.autopsy.ranks, examination.autopsy.runs) == ((0, 1), 2)


def test_of_one_node_alone_the_others_are_asked_for(recorded: Recorded) -> None:
    assert "1 of the job's 2 ranks are known" in " ".join(examined(recorded.runs[1]).notes)


def test_a_run_names_the_parameters_of_a_log(recorded: Recorded, tmp_path: Path) -> None:
    recorded.script.rename(tmp_path / "elsewhere.py")
    try:
        (alone,) = causes_of(examined(recorded.logs[0]))
        assert (alone.code, "indices 3, 4" in alone.title) == ("DDP201", True)
        mixed = examined(recorded.runs[1], recorded.logs[0])
    finally:
        (tmp_path / "elsewhere.py").rename(recorded.script)
    assert len(causes_of(mixed)) == 1
    assert any("those of the recorded run" in note for note in mixed.notes)


def test_the_script_names_the_parameters_of_a_log(recorded: Recorded) -> None:
    examination = examined(recorded.logs[0])
    (cause,) = causes_of(examination)
    # The module's own parameter comes before those of its parts.
    assert "parameters aux_head.weight, aux_head.bias got no gradient" in cause.title
    assert any("are read from" in note and "as it is now" in note for note in examination.notes)


def test_names_from_the_source_are_those_that_torch_counts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(JOB)
    said = subprocess.check_output((sys.executable, str(script), "--names"), text=True)
    assert str(list(parameter_names(script_at(script)))) == said.strip()


@pytest.mark.parametrize(
    ("old", "new", "known"),
    [
        ("self.aux_head = nn.Linear(4, 4)", "self.aux_head = made_elsewhere()", 3),
        ("self.aux_head = nn.Linear(4, 4)", "self.aux_head = nn.Linear(4, 4, bias=flag)", 3),
        ("self.token =", "if True:\n            self.token =", 0),
        ("model = DDP(Net())", "net = Net()\n    net.norm.requires_grad_(False)\n    model = DDP(net)", 0),
        ("class Net(nn.Module)", "class Net(Known)", 0),
    ],
)
def test_behind_a_part_that_the_source_does_not_tell_no_number_is_known(
    old: str, new: str, known: int, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    assert old in JOB
    script.write_text(JOB.replace(old, new))
    assert len(parameter_names(script_at(script))) == known


def test_a_damaged_run_costs_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.json").write_text("{")
    examination = examined(tmp_path / "run")
    assert any("cannot be read" in note for note in examination.notes)
    assert examination.exit_code == 3
