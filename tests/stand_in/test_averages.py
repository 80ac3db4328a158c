"""Where a torch before 2.13 stands in for NCCL, gloo gives the mean that was asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.check_command import with_our_tree

_JOB = """
import sys
import torch
import torch.distributed as dist
from ddpdoctor.probe.stand_in.process_groups import average_on_gloo

torch.__version__ = "2.8.0"  # Of which gloo sums in reduce_scatter, and says nothing.
sums = dist.all_reduce
average_on_gloo(torch)
assert dist.all_reduce is not sums
dist.init_process_group("gloo")
rank, mean = dist.get_rank(), dist.ReduceOp.AVG
given = torch.arange(4.0) + rank
reduced, part, listed = given.clone(), torch.empty(2), torch.empty(2)
dist.all_reduce(reduced, op=mean)
dist.reduce_scatter_tensor(part, given, op=mean)
work = dist.reduce_scatter(listed, list(given.chunk(2)), mean, async_op=True)
work.wait()
summed = given.clone()
dist.all_reduce(summed)
kept = torch.arange(4.0) + rank
half = 2 * rank
told = [reduced.tolist() == [0.5, 1.5, 2.5, 3.5], part.tolist() == [half + 0.5, half + 1.5], listed.equal(part)]
told += [summed.tolist() == [1.0, 3.0, 5.0, 7.0], given.equal(kept)]
with open(f"{sys.argv[1]}/{rank}", "w") as file:
    file.write(str(told))
dist.barrier()
"""


def test_a_mean_is_a_mean_in_every_collective_and_what_is_given_stays(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(_JOB, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "job.py", "."]
    done = subprocess.run(command, cwd=tmp_path, env=with_our_tree(), capture_output=True, text=True, timeout=300)
    told = [tmp_path.joinpath(str(rank)) for rank in range(2)]
    assert all(one.exists() for one in told), done.stderr
    assert [one.read_text() for one in told] == [str([True] * 5)] * 2
