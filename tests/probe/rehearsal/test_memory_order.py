"""What collectives are given that does not lie in memory as they take it, or that they have summed already."""

from __future__ import annotations

import pytest

from ddpdoctor.checks.collectives import discarded_collective_result, sum_as_mean
from ddpdoctor.finding import Finding
from tests.probe.rehearsal.conftest import HEAD, Rehearse

VIEWS = """
dist.init_process_group("gloo")
rank = dist.get_rank()
table = torch.arange(12.0).reshape(4, 3) * (1 + rank)
square = torch.ones(3, 3)
for turn in range(3):
    dist.broadcast(table[:, :2], src=0)  # gaps
    dist.all_reduce(table[:, 2])  # gaps
    dist.all_reduce(table.view(-1)[::2])  # gaps
    dist.reduce(torch.ones(4, 3)[:1].expand(4, 3), dst=0)  # gaps
    dist.broadcast(table.t() if rank == 0 else torch.zeros(3, 4), src=0)  # gaps
    dist.scatter(torch.zeros(4), [table[:, 0], table[:, 1]] if rank == 0 else None, src=0)  # gaps
    dist.all_reduce(table[1:3])
    dist.all_reduce(table[:, 2].contiguous())
    dist.all_reduce(table.t())
    dist.all_reduce(square[:, :])
    dist.all_reduce(torch.ones(4, 1)[:, 0])
    dist.all_reduce(torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last))
    dist.all_gather([torch.zeros(4), torch.zeros(4)], table[:, 0])
    dist.all_gather(list(torch.zeros(4, 2).unbind(1)), table[:, 0])
    if rank == 0:
        dist.all_reduce(square.t())
    else:
        dist.all_reduce(square.mT)
dist.destroy_process_group()
"""


def test_views_with_gaps_or_in_another_order_than_the_other_ranks(rehearse_script: Rehearse) -> None:
    found = list(discarded_collective_result.in_run(rehearse_script(VIEWS)))
    lines = [number for number, line in enumerate((HEAD + VIEWS).splitlines(), 1) if line.endswith("# gaps")]
    assert sorted(one.locations[0].line for one in found if isinstance(one, Finding)) == lines


SUMS = """
dist.init_process_group("gloo")
rank = dist.get_rank()
count, flag = torch.zeros(1), torch.zeros(2)
for turn in range(1, 4):
    hits = torch.tensor(float(3 + rank + turn))
    for value in {"full": hits, "conditional": hits}.values():
        dist.all_reduce(value)  # twice
    pair = torch.tensor([1.0 + rank, 2.0])
    for value in [pair, pair.detach()]:
        dist.all_reduce(value)  # twice
    row = torch.tensor([2.0 + rank])
    dist.all_reduce(row)
    dist.all_reduce(row.view(()))  # twice
    loss = torch.tensor(float(rank + turn))
    mean = loss
    dist.all_reduce(loss)
    dist.all_reduce(mean)  # twice
    for name in ("a", "b"):
        count.fill_(2.0 ** turn if name == "a" else 2.0 ** (turn + 1))
        dist.all_reduce(count)
    for value in {"full": hits.clone(), "conditional": hits.clone()}.values():
        dist.all_reduce(value)
    dist.all_reduce(flag)
    dist.all_reduce(flag)
    largest = torch.tensor(float(rank))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    kept = torch.tensor([1.0 + rank])
    dist.all_reduce(kept)
    kept.data.copy_(torch.tensor([5.0 + rank]))
    dist.all_reduce(kept)
    dist.all_reduce(torch.tensor([1.0]))
    dist.all_reduce(torch.tensor([2.0]))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("body", [SUMS, SUMS.replace("import os", "").replace("dist.all_reduce", "reduce_sum")])
def test_one_tensor_that_is_summed_twice_with_no_change_between(rehearse_script: Rehearse, body: str) -> None:
    helper = "\ndef reduce_sum(tensor, **options):\n    dist.all_reduce(tensor, **options)  # twice\n"
    record = rehearse_script(body if body is SUMS else helper + body.replace("# twice", ""))
    found = [one for one in sum_as_mean.in_run(record) if isinstance(one, Finding)]
    text = HEAD + (body if body is SUMS else helper)
    lines = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# twice")]
    assert sorted({one.locations[0].line for one in found if one.locations}) == lines
