from __future__ import annotations

from pathlib import Path

import pytest

from tests.source.marked import check_marks

DIVERGENCES = ("DDP301", "DDP302", "DDP303", "DDP309", "DDP314")

CORRECT = {
    "rank 0 first, then the others": """
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        if rank != 0:
            dist.barrier()
        data = torch.load("data.pt")
        if rank == 0:
            dist.barrier()
        """,
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
    "payload prepared on rank 0 only": """
        dist.init_process_group("gloo")
        box = [None]
        if dist.get_rank() == 0:
            box[0] = torch.load("index.pt")
        dist.broadcast_object_list(box, src=0)
        if box[0] is not None:
            dist.barrier()
        """,
    "same collective in both arms": """
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            x = torch.load("x.pt")
            dist.broadcast(x, src=0)
        else:
            x = torch.empty(3)
            dist.broadcast(x, src=0)
        """,
    "gather with and without a list": """
        dist.init_process_group("gloo")
        x = torch.ones(1)
        if dist.get_rank() == 0:
            dist.gather(x, [torch.ones(1) for _ in range(dist.get_world_size())])
        else:
            dist.gather(x)
        """,
    "return after the last collective": """
        def report(rank, total):
            dist.all_reduce(total)
            if rank != 0:
                return
            print(total)

        dist.init_process_group("gloo")
        report(dist.get_rank(), torch.ones(1))
        """,
    "point to point": """
        dist.init_process_group("gloo")
        x = torch.ones(1)
        if dist.get_rank() == 0:
            dist.send(x, 1)
        elif dist.get_rank() == 1:
            dist.recv(x, 0)
        """,
    "a sub-group whose members all come": """
        dist.init_process_group("gloo")
        members = dist.new_group([0, 1])
        if dist.get_rank() in (0, 1):
            dist.all_reduce(torch.ones(1), group=members)
        """,
    "stop decided together": """
        dist.init_process_group("gloo")
        for epoch in range(10):
            stop = torch.zeros(1)
            if dist.get_rank() == 0:
                stop += 1
            dist.all_reduce(stop)
            if stop.item() > 0:
                break
            dist.barrier()
        """,
    "script that also runs alone": """
        distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
        rank = 0
        if distributed:
            dist.init_process_group("gloo")
            rank = dist.get_rank()
        if rank == 0:
            print("hello")
        if distributed:
            dist.barrier()
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
    "helper that returns early without ranks": """
        def reduce_mean(x):
            if not dist.is_available() or not dist.is_initialized():
                return x
            if dist.get_world_size() == 1:
                return x
            dist.all_reduce(x)
            return x

        dist.init_process_group("gloo")
        total = reduce_mean(torch.ones(1))
        if dist.get_rank() == 0:
            print(total)
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
    "validation of model.module on rank 0": """
        dist.init_process_group("gloo")
        model = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        if dist.get_rank() == 0:
            with torch.no_grad():
                model.module(torch.ones(2, 4))
        """,
    "forward of a model without buffers on rank 0": """
        dist.init_process_group("gloo")
        model = DDP(nn.Linear(4, 4))
        if dist.get_rank() == 0:
            model(torch.ones(2, 4))
        """,
    "loops over all ranks": """
        dist.init_process_group("gloo")
        for turn in range(dist.get_world_size()):
            if turn == dist.get_rank():
                print("my turn")
            dist.barrier()
        """,
    "backward of a model of its own": """
        dist.init_process_group("gloo")
        model = nn.Linear(4, 4)
        if dist.get_rank() == 0:
            model(torch.ones(1, 4)).sum().backward()
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
    "a decorator that returns early on other ranks": """
        def main_process(function):
            def wrapper(*args):
                if dist.get_rank() != 0:
                    return None
                return function(*args)
            return wrapper

        @main_process
        def log(text):
            print(text)

        dist.init_process_group("gloo")
        log("hello")
        dist.barrier()
        """,
    "parent of spawned ranks": """
        def worker(rank):
            dist.init_process_group("gloo", rank=rank, world_size=2)
            dist.barrier()

        if __name__ == "__main__":
            if not os.path.exists("data"):
                os.makedirs("data")
            mp.spawn(worker, nprocs=2)
        """,
    "exception handler": """
        try:
            rank = int(os.environ["RANK"])
        except KeyError:
            rank = 0
        dist.init_process_group("gloo")
        try:
            dist.barrier()
        finally:
            dist.destroy_process_group()
        """,
}


@pytest.mark.parametrize("text", CORRECT.values(), ids=CORRECT)
def test_correct_code_stays_silent(tmp_path: Path, text: str) -> None:
    check_marks(tmp_path, text, *DIVERGENCES)
