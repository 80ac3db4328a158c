from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.finding import Severity
from ddpdoctor.source.script.script import read_script
from tests.source.marked import check_marks, findings_of, written

DIVERGENCES = ("DDP301", "DDP302", "DDP303", "DDP309", "DDP314")

BROKEN = {
    "environment as a dict of a few variables": """
        environment = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE")}
        sizes = {name: int(os.environ.get(name, 1)) for name in ["WORLD_SIZE"]}
        dist.init_process_group("gloo")
        if sizes["WORLD_SIZE"] > 1:
            dist.barrier()
        if int(environment["WORLD_SIZE"]) > 1:
            dist.barrier()
        if int(environment["RANK"]) == 0:
            dist.barrier()  # DDP301
        """,
    "early return under a further condition": """
        def step(rank, batch):
            if rank == 1 and batch is None:
                return
            dist.all_reduce(batch)  # DDP301

        dist.init_process_group("gloo")
        step(dist.get_rank(), torch.load("x.pt"))
        """,
    "ternary": """
        dist.init_process_group("gloo")
        dist.barrier() if dist.get_rank() == 0 else None  # DDP301
        """,
    "and": """
        dist.init_process_group("gloo")
        dist.get_rank() == 0 and dist.barrier()  # DDP301
        """,
    "DDP built on one rank": """
        dist.init_process_group("gloo")
        model = nn.Linear(4, 4)
        if dist.get_rank() == 0:
            model = DDP(model)  # DDP314
        """,
    "rank_zero_only": """
        from pytorch_lightning.utilities import rank_zero_only

        @rank_zero_only
        def log():
            dist.barrier()  # DDP301

        dist.init_process_group("gloo")
        log()
        """,
    "own decorator": """
        import functools

        def main_only(function):
            @functools.wraps(function)
            def wrapped(*args):
                if dist.get_rank() == 0:
                    return function(*args)
            return wrapped

        @main_only
        def log():
            dist.barrier()  # DDP301

        dist.init_process_group("gloo")
        log()
        """,
    "accelerator": """
        from accelerate import Accelerator

        accelerator = Accelerator()
        if accelerator.is_main_process:
            print("saving")
            accelerator.wait_for_everyone()  # DDP301
        """,
    "break under a further condition": """
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        for step in range(100):
            dist.barrier()  # DDP301
            if rank == 0 and step > torch.initial_seed():
                break
        """,
    "match": """
        dist.init_process_group("gloo")
        match dist.get_rank():
            case 0:
                dist.barrier()  # DDP301
            case _:
                pass
        """,
    "loop bound": """
        dist.init_process_group("gloo")
        for _ in range(dist.get_rank()):
            dist.barrier()  # DDP301
        """,
    "two defects": """
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        if rank == 0:
            dist.barrier()  # DDP301
        x = torch.ones(1)
        dist.all_reduce(x)
        if rank == 0:
            dist.broadcast(x, 0)  # DDP301
        """,
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_collective_that_a_rank_test_keeps_from_some_ranks_is_found(tmp_path: Path, text: str) -> None:
    check_marks(tmp_path, text, *DIVERGENCES)


def test_finding_names_ranks_condition_and_call_chain(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        def total(x):
            dist.all_reduce(x)

        def main():
            dist.init_process_group("gloo")
            if dist.get_rank() == 0:
                total(torch.ones(1))

        main()
        """,
    )
    (finding,) = findings_of(read_script(path), "DDP301")
    assert finding.severity is Severity.ERROR
    assert finding.title == ("only rank 0 reaches all_reduce: rank 0 runs [all_reduce]; the others run nothing more")
    call, condition = finding.locations
    assert (call.line, call.column, call.end_column, call.function) == (12, 5, 23, "total")
    assert (condition.line, condition.function) == (16, "main")
    assert finding.evidence[0].text == "`dist.get_rank() == 0` decides"
    assert [frame.line for frame in finding.evidence[1].stack] == [12, 17, 19]


def test_a_rank_that_leaves_early_is_told_with_the_line(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        for step in range(10):
            if rank == 1 and step == 5:
                break
            dist.barrier()
        """,
    )
    (finding,) = findings_of(read_script(path), "DDP301")
    assert finding.title == "rank 1 can leave at line 15, before barrier, which the others run"
    assert [place.line for place in finding.locations] == [16, 15, 14]


def test_who_leaves_is_told_of_once_whatever_collectives_lie_behind(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        def main(args):
            dist.init_process_group("gloo")
            if dist.get_rank() == 0:
                if args.exists:
                    return
            if args.resumes:
                dist.broadcast_object_list(names)
            for epoch in range(args.epochs):
                dist.all_reduce(batch)
        main(parser.parse_args())
        """,
    )
    (finding,) = findings_of(read_script(path), "DDP301")
    assert [place.line for place in finding.locations] == [17, 15, 13]


def test_a_rank_known_by_its_name_only_is_a_warning(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        def train(rank, world_size):
            dist.init_process_group("gloo")
            if rank == 0:
                dist.barrier()
        """,
    )
    (finding,) = findings_of(read_script(path), "DDP301")
    assert finding.severity is Severity.WARNING


def test_what_the_group_is_made_with_is_the_rank(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        def train(number, count):
            dist.init_process_group("gloo", rank=number, world_size=count)
            if number == 0:
                dist.barrier()
        """,
    )
    (finding,) = findings_of(read_script(path), "DDP301")
    assert finding.severity is Severity.ERROR


def test_the_defect_may_be_in_an_imported_module(tmp_path: Path) -> None:
    written(
        tmp_path,
        """
        def main_rank():
            return dist.get_rank() == 0

        def finish(value):
            if main_rank():
                dist.all_reduce(value)
        """,
        name="tools/comm.py",
    )
    (tmp_path / "tools" / "__init__.py").write_text("")
    path = written(
        tmp_path,
        """
        from tools.comm import finish

        dist.init_process_group("gloo")
        finish(torch.ones(1))
        """,
    )
    (finding,) = findings_of(read_script(path), "DDP301")
    assert finding.locations[0].file == str(tmp_path / "tools" / "comm.py")
    assert finding.locations[0].line == 16


def test_a_collective_behind_a_forward_that_ranks_miss_is_a_second_defect(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        from torch.nn.parallel import DistributedDataParallel as DDP
        dist.init_process_group("gloo")
        model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
        def score(x):
            if dist.get_rank() != 0:
                return
            hits = model(x).sum().detach()
            dist.all_reduce(hits)
        for step in range(10):
            model(torch.randn(8, 4)).sum().backward()
            score(torch.randn(8, 4))
        """,
    )
    script = read_script(path)
    (forward,) = findings_of(script, "DDP303")
    (reduction,) = findings_of(script, "DDP301")
    assert forward.locations[1:] == reduction.locations[1:]
    assert reduction.location is not None and forward.location is not None
    assert reduction.location.line == forward.location.line + 1
