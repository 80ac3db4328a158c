from __future__ import annotations

from pathlib import Path

import pytest

from tests.source.marked import check_marks

DIVERGENCES = ("DDP301", "DDP302", "DDP303", "DDP309", "DDP314")

CORRECT = {
    "rank 0 first, with the values of older launchers": """
        import argparse
        args = argparse.ArgumentParser().parse_args()
        if args.local_rank not in [-1, 0]:
            dist.barrier()
        data = torch.load("data.pt")
        if args.local_rank == 0:
            dist.barrier()
        """,
    "rank 0 first, as a context manager": """
        from contextlib import contextmanager

        @contextmanager
        def rank_zero_first(rank):
            if rank != 0:
                dist.barrier()
            yield
            if rank == 0:
                dist.barrier()

        def load(rank):
            with rank_zero_first(rank):
                return torch.load("data.pt")

        dist.init_process_group("gloo")
        load(dist.get_rank())
        dist.barrier()
        """,
    "gather with and without a list": """
        dist.init_process_group("gloo")
        x = torch.ones(1)
        if dist.get_rank() == 0:
            dist.gather(x, [torch.ones(1) for _ in range(dist.get_world_size())])
        else:
            dist.gather(x)
        """,
    "negative rank stands for no ranks": """
        ddp = int(os.environ.get("RANK", -1)) != -1
        if ddp:
            dist.init_process_group("gloo")
            rank = int(os.environ["RANK"])
            master = rank == 0
        else:
            master = True
        if master:
            os.makedirs("out", exist_ok=True)
        if ddp:
            dist.destroy_process_group()
        """,
    "dead branch": """
        dist.init_process_group("gloo")
        DEBUG = False
        if DEBUG and dist.get_rank() == 0:
            dist.barrier()
        if False:
            dist.barrier()
        """,
    "rank of an adapter": """
        class Adapter(nn.Module):
            def __init__(self, rank=8):
                super().__init__()
                self.rank = rank
                if self.rank > 0:
                    dist.barrier()

        dist.init_process_group("gloo")
        Adapter()
        """,
    "a rank that raises": """
        dist.init_process_group("gloo")
        if dist.get_rank() == 0 and not os.path.exists("data"):
            raise SystemExit("no data")
        dist.barrier()
        """,
    "loops over all ranks": """
        dist.init_process_group("gloo")
        for turn in range(dist.get_world_size()):
            if turn == dist.get_rank():
                print("my turn")
            dist.barrier()
        """,
    "a wrap made at its first use": """
        class Runner:
            def __init__(self, model):
                self._model = model
                self._wrapped = None

            @property
            def model(self):
                if self._wrapped is None:
                    self._wrapped = DDP(self._model)
                return self._wrapped

            def log(self):
                if dist.get_rank() == 0:
                    print(self.model)

            def train(self):
                self.model(torch.ones(1, 4)).sum().backward()
                self.log()

        dist.init_process_group("gloo")
        Runner(nn.Linear(4, 4)).train()
        """,
}


@pytest.mark.parametrize("text", CORRECT.values(), ids=CORRECT)
def test_correct_code_stays_silent(tmp_path: Path, text: str) -> None:
    check_marks(tmp_path, text, *DIVERGENCES)
