"""What ranks leave in the record, and how their ends are told apart."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from .conftest import Rehearse


def test_gradients_buffers_and_collectives_are_seen(rehearse_script: Rehearse) -> None:
    record = rehearse_script(
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
                self.register_buffer("table", torch.ones(1000))
                self.norm = nn.BatchNorm1d(4)
            def forward(self, x):
                return self.norm(self.used(x))

        dist.init_process_group("gloo")
        model = DDP(Model(), find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
        losses = {"boxes": torch.ones(()), "masks": torch.ones(())}
        values = torch.stack([losses[name] for name in sorted(losses)])
        dist.all_reduce(values)
        total = torch.ones(1)
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
        dist.broadcast(total, src=1)
        """
    )
    assert {missing.parameters for missing in record.missing_gradients} == {("unused.weight", "unused.bias")}
    assert {missing.rank for missing in record.missing_gradients} == {0, 1}
    wrap = record.wraps[0]
    assert wrap.options["find_unused_parameters"] is True
    assert (wrap.buffers[0].name, wrap.buffers[0].size_bytes) == ("table", 4000)
    of_rank = [state.digests for state in record.buffers if state.rank == 0]
    assert len(of_rank) == 5
    assert len({digests["table"] for digests in of_rank}) == 1
    assert len({digests["norm.running_mean"] for digests in of_rank}) == 5

    for track in record.collectives:
        signatures = [record.signatures[number] for number in track.signature]
        assert [s.origin for s in signatures[:3]] == ["ddp-construct"] * 3
        assert "ddp-forward" in {s.origin for s in signatures}
        assert "ddp-backward" in {s.origin for s in signatures}
        last = [(s.kind, s.reduce_op, s.root, s.origin) for s in signatures[-2:]]
        assert last == [("all_reduce", "max", None, "user"), ("broadcast", "", 1, "user")]
        assert [s.entries_of for s in signatures[-3:]] == ["losses", "", ""]
        assert list(track.sequence) == list(range(len(track)))
        line = record.site(track.site[len(track) - 1]).innermost
        assert line is not None and Path(line.file).name == "train.py"
        assert "dist.broadcast" in Path(line.file).read_text().splitlines()[line.line - 1]


def test_the_tap_changes_neither_results_nor_the_group(rehearse_script: Rehearse) -> None:
    record = rehearse_script(
        """
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        assert dist.get_backend() == "gloo"
        x = torch.tensor([float(rank + 1)])
        dist.all_reduce(x)
        assert x.item() == 3.0
        gathered = [torch.zeros(1) for _ in range(2)]
        dist.all_gather(gathered, torch.tensor([float(rank)]))
        assert [t.item() for t in gathered] == [0.0, 1.0]
        objects = [None, None]
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": 0}, {"rank": 1}]
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        assert x.item() == 6.0
        out = [None]
        dist.scatter_object_list(out, [1, 2] if rank == 0 else [None, None])
        assert out == [rank + 1]
        group = dist.new_group([0, 1])
        dist.barrier(group=group)
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        print("all right")
        """
    )
    assert [rank.output_tail.strip().splitlines()[-1] for rank in record.ranks] == ["all right"] * 2
    assert [(group.ranks, group.ordinal) for group in record.groups] == [((0, 1), 0), ((0, 1), 1)]
    kinds = [record.signatures[number].kind for number in record.collectives[0].signature]
    assert kinds[-1] == "send" and "barrier" in kinds and "scatter" in kinds
    assert {(signature.kind == "all_gather", signature.uneven) for signature in record.signatures} == {
        (True, False),
        (False, None),
    }


def test_an_exception_names_its_line_and_is_told_from_its_echo(rehearse_script: Rehearse) -> None:
    record = rehearse_script(
        """
        dist.init_process_group("gloo")
        x = torch.ones(1)
        dist.all_reduce(x)
        if dist.get_rank() == 1:
            raise ValueError("batch 17 is damaged")
        dist.all_reduce(x)
        """
    )
    guilty = record.of_rank(1)
    assert guilty is not None and guilty.end == "raised"
    assert guilty.exceptions[0].message == "batch 17 is damaged"
    assert not guilty.exceptions[0].communication
    other = record.of_rank(0)
    assert other is not None and all(error.communication for error in other.exceptions)


@pytest.mark.parametrize(
    ("leave", "end", "code"),
    [
        ("os._exit(7)", "left-by-exit", 7),
        ("sys.exit(2)", "left-by-exit", 2),
        ("sys.exit('no data set')", "left-by-exit", 1),
    ],
)
def test_bad_ways_out_of_a_process(rehearse_script: Rehearse, leave: str, end: str, code: int) -> None:
    record = rehearse_script(
        f"""
        dist.init_process_group("gloo")
        try:
            if dist.get_rank() == 1:
                {leave}
        finally:
            print("cleaned up")
        time.sleep(1)
        """
    )
    left = record.of_rank(1)
    assert left is not None and (left.end, left.exit_code) == (end, code)


def test_good_ways_out_of_a_process(rehearse_script: Rehearse) -> None:
    record = rehearse_script(
        """
        dist.init_process_group("gloo")
        # Gloo may still connect on the other ranks: they fail where one of them leaves now.
        store = dist.distributed_c10d._get_default_store()
        store.set(f"connected {dist.get_rank()}", "")
        store.wait([f"connected {rank}" for rank in range(3)])
        if dist.get_rank() == 1:
            sys.exit(0)
        if dist.get_rank() == 2:
            sys.exit()
        """,
        nproc=3,
    )
    assert [(rank.end, rank.exit_code) for rank in record.ranks] == [("finished", 0)] * 3


def test_a_script_that_spawns_its_ranks(rehearse_script: Rehearse) -> None:
    record = rehearse_script(
        """
        import torch.multiprocessing as mp
        def work(rank, size):
            dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"file://{os.path.abspath(sys.argv[1])}")
            model = DDP(nn.Linear(4, 3))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
            dist.destroy_process_group()
        if __name__ == "__main__":
            mp.spawn(work, args=(2,), nprocs=2)
        """,
        spawns_ranks=True,
        arguments=("store",),
    )
    assert record.job.ranks_reported == (0, 1) and record.job.ranks_expected == 2
    assert [rank.end for rank in record.ranks] == ["finished"] * 2
    assert record.steps() == 3


def test_the_time_limit_ends_a_sleeping_script_with_its_stacks(rehearse_script: Rehearse) -> None:
    # On a busy machine a rank takes longer than that to come to its sleep: then the limit is a longer one.
    for limit_s in (12.0, 36.0, 108.0):
        started = time.monotonic()
        record = rehearse_script(
            """
            def oversleep():
                time.sleep(10_000)
            dist.init_process_group("gloo")
            import subprocess
            subprocess.Popen(["sleep", "9973"], start_new_session=True)
            oversleep()
            """,
            time_limit_s=limit_s,
            overlay=False,
        )
        main = [stack for stack in record.stacks if stack.main]
        if len(main) == 2:
            break
    assert record.job.stop_reason == "time-limit"
    assert time.monotonic() - started < limit_s + 48
    assert {stack.rank for stack in main} == {0, 1}
    assert all("oversleep" in {frame.function for frame in stack.frames} for stack in main)
    assert any("sleep 9973" in done for done in record.job.not_held_back)
    assert not psutil.Process().children(recursive=True)
