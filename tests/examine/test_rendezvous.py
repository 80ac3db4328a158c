"""Scripts that meet at an address of their own, or for more ranks than were started: said, then rehearsed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.check_command import check

TRAINING = """
import os
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def train(rank=-1, world_size=-1):
    MEET
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.randn(8, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    START
"""


def examined(directory: Path, meet: str, start: str = "train()") -> tuple[int, dict[str, Any]]:
    (directory / "train.py").write_text(TRAINING.replace("MEET", meet).replace("START", start))
    return check("--time-limit", "240", "train.py", cwd=directory)


def shown(report: dict[str, Any]) -> list[tuple[str, int]]:
    """Codes and lines of what the rehearsal showed."""
    return [
        (finding["code"], finding["locations"][0]["line"])
        for finding in report["findings"]
        if "rehearsal" in finding["basis"]
    ]


def test_an_address_of_another_network_is_named_and_the_rest_rehearsed(tmp_path: Path) -> None:
    ranks = "rank=int(os.environ['RANK']), world_size=int(os.environ['WORLD_SIZE'])"
    code, report = examined(tmp_path, f"dist.init_process_group('gloo', 'tcp://10.231.7.9:29511', {ranks})")
    rehearsal = report["rehearsal"]
    assert (code, rehearsal["status"], rehearsal["steps"]) == (1, "completed", 3), rehearsal
    assert shown(report) == [("DDP504", 11)]
    assert "the rendezvous took place on this machine instead of 10.231.7.9:29511" in rehearsal["notes"]


def test_a_host_that_nobody_knows_in_the_environment_is_led_here_too(tmp_path: Path) -> None:
    meet = "os.environ['MASTER_ADDR'] = 'dolphin'; dist.init_process_group('gloo')"
    code, report = examined(tmp_path, meet)
    assert (code, report["rehearsal"]["steps"]) == (1, 3), report["rehearsal"]
    assert shown(report) == [("DDP504", 11)]


def test_more_ranks_than_the_launcher_starts_are_named_as_missing(tmp_path: Path) -> None:
    code, report = examined(tmp_path, "dist.init_process_group('gloo', world_size=4, rank=int(os.environ['RANK']))")
    assert (code, report["rehearsal"]["steps"]) == (1, 3), report["rehearsal"]
    assert shown(report) == [("DDP504", 11)]
    (said,) = (finding["title"] for finding in report["findings"] if "rehearsal" in finding["basis"])
    assert said.endswith("ranks 2 to 3 never arrive")


def test_ranks_of_a_second_node_are_waited_for_by_nobody(tmp_path: Path) -> None:
    meet = "dist.init_process_group('gloo', 'tcp://10.231.7.9:29511', rank=2 + rank, world_size=4)"
    code, report = examined(tmp_path, meet, "mp.spawn(train, nprocs=2)")
    rehearsal = report["rehearsal"]
    assert (code, rehearsal["ranks"], rehearsal["steps"], shown(report)) == (0, 2, 3, []), report["findings"]
    assert "the script creates its group for 4 ranks; here it was created for 2" in rehearsal["notes"]


@pytest.mark.parametrize("late", ["0", "1"])
def test_ranks_that_take_one_number_are_proved_in_seconds(tmp_path: Path, late: str) -> None:
    turn = f"import time; time.sleep(3 * (os.environ['RANK'] == '{late}'))"
    code, report = examined(tmp_path, f"{turn}; dist.init_process_group('gloo', rank=0)")
    rehearsal = report["rehearsal"]
    assert (code, rehearsal["status"], shown(report)) == (1, "stopped", [("DDP504", 11)]), rehearsal
    assert rehearsal["reason"].startswith("two ranks join the group as rank 0")


def test_launched_ranks_that_each_spawn_the_whole_group_are_proved(tmp_path: Path) -> None:
    meet = "dist.init_process_group('gloo', 'tcp://127.0.0.1:29511', rank=rank, world_size=2)"
    (tmp_path / "train.py").write_text(TRAINING.replace("MEET", meet).replace("START", "mp.spawn(train, nprocs=2)"))
    launch = ("--", "torchrun", "--nproc-per-node=2", "train.py")
    code, report = check("--time-limit", "240", *launch, cwd=tmp_path)
    rehearsal = report["rehearsal"]
    assert code == 1 and rehearsal["reason"].startswith("two ranks join the group as rank"), rehearsal
    assert ("DDP504", 11) in shown(report)


def test_a_script_that_is_started_once_for_each_rank_gets_each_number(tmp_path: Path) -> None:
    meet = """import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument('-r', '--rank', type=int)
    args = parser.parse_args()
    dist.init_process_group('gloo', 'tcp://127.0.0.1:29511', rank=args.rank, world_size=2)"""
    (tmp_path / "train.py").write_text(TRAINING.replace("MEET", meet).replace("START", "train()"))
    _, report = check("--time-limit", "240", "--", "python", "train.py", "-r", "0", cwd=tmp_path)
    rehearsal = report["rehearsal"]
    assert (rehearsal["status"], rehearsal["ranks"], rehearsal["steps"]) == ("completed", 2, 3), rehearsal
    assert any("each rank got its own" in note for note in rehearsal["notes"])
    # No launcher told these ranks where to meet.
    assert "DDP504" not in dict(shown(report))


def test_what_slurm_leaves_to_the_script_is_set_over_no_launcher(tmp_path: Path) -> None:
    meet = """os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'] = '127.0.0.1', '29512'
    number, ranks = int(os.environ['SLURM_PROCID']), int(os.environ['SLURM_NTASKS'])
    dist.init_process_group('gloo', rank=number, world_size=ranks)"""
    (tmp_path / "train.py").write_text(TRAINING.replace("MEET", meet).replace("START", "train()"))
    _, report = check("--time-limit", "240", "--", "python", "train.py", cwd=tmp_path)
    rehearsal = report["rehearsal"]
    assert (rehearsal["status"], rehearsal["ranks"], rehearsal["steps"]) == ("completed", 2, 3), rehearsal
    assert "DDP504" not in dict(shown(report))


def test_a_command_for_one_of_several_nodes_that_spawns_one_rank_gets_the_others_here(tmp_path: Path) -> None:
    meet = "dist.init_process_group('gloo', 'tcp://127.0.0.1:29511', rank=rank, world_size=2)"
    code, report = examined(tmp_path, meet, "mp.spawn(train, nprocs=1)")
    rehearsal = report["rehearsal"]
    assert (code, rehearsal["ranks"], rehearsal["steps"], shown(report)) == (0, 2, 3, []), report["findings"]
    why = "the script starts 1 of the 2 ranks of its group; rehearsed again with 2 on this machine"
    assert why in rehearsal["notes"]


def test_a_spawned_rank_that_is_of_one_number_wherever_it_runs_is_told_in_seconds(tmp_path: Path) -> None:
    meet = "dist.init_process_group('gloo', 'tcp://127.0.0.1:29511', rank=0, world_size=2)"
    code, report = examined(tmp_path, meet, "mp.spawn(train, nprocs=1)")
    rehearsal = report["rehearsal"]
    assert (code, rehearsal["steps"], shown(report)) == (3, 0, []), report["findings"]
    assert rehearsal["reason"] == "the command starts 1 of the 2 ranks that its group waits for"
    assert rehearsal["hint"].startswith("Start every rank of the job with one command")


def test_the_launchers_store_is_found_though_the_script_has_set_its_own_address(tmp_path: Path) -> None:
    meet = """rendezvous = sys.modules['torch.distributed.rendezvous']
    make, launchers = rendezvous.TCPStore, os.environ['MASTER_PORT']
    def make_store(**options):
        # Torch 2.14 opens a second store where the variables name another place than the one asked for.
        assert str(options['port']) == os.environ['MASTER_PORT'] == launchers, (options, launchers)
        return make(**options)
    rendezvous.TCPStore = make_store
    os.environ['MASTER_PORT'] = '29513'
    dist.init_process_group('gloo')
    assert os.environ['MASTER_PORT'] == '29513'"""
    _, report = examined(tmp_path, meet)
    assert report["rehearsal"]["steps"] == 3, report["rehearsal"]


def test_a_script_that_spawns_its_second_rank_and_is_the_first_itself_has_both(tmp_path: Path) -> None:
    meet = """if rank < 0:
        mp.spawn(train, args=(2,), nprocs=1, join=False)
    dist.init_process_group('gloo', 'tcp://127.0.0.1:29511', rank=1 if rank == 0 else 0, world_size=2)"""
    _, report = examined(tmp_path, meet, "train()")
    rehearsal = report["rehearsal"]
    assert (rehearsal["ranks"], rehearsal["steps"]) == (2, 3), rehearsal
