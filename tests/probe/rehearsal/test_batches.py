"""Which batches a rehearsal draws: the last ones, those of several ranks as one, of workers, and after a cut."""

from __future__ import annotations

import ast
import importlib
import multiprocessing
import pickle
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.rehearsal.data.lengths import Lengths, purpose_of, read, short_batch_samples
from ddpdoctor.probe.rehearsal.data.loaders import few_workers, may_come_of_less_data
from ddpdoctor.probe.rehearsal.equivalence.feeding import MOST_BYTES, CannotJoin, Feeding, joined
from ddpdoctor.probe.rehearsal.surroundings import LightningTrainers

# How many samples a loader leaves for the last batch of a pass.


class Stream(IterableDataset[int]):  # type: ignore[misc]
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Filled(BatchSampler):  # type: ignore[misc]
    even_batches = True


def sharded(samples: int, replicas: int = 2, drop_last: bool = False) -> DistributedSampler[int]:
    return DistributedSampler(torch.arange(samples), num_replicas=replicas, rank=0, drop_last=drop_last)


@pytest.mark.parametrize(
    ("samples", "options", "ranks_of_job", "left"),
    [
        (64, {"batch_size": 8}, 0, 0),
        (66, {"batch_size": 8}, 0, 2),
        (66, {"batch_size": 8, "drop_last": True}, 0, 0),
        (66, {"batch_size": 8, "sampler": sharded(66)}, 0, 1),
        (66, {"batch_size": 8, "sampler": sharded(66, drop_last=True)}, 0, 1),
        (64, {"batch_size": 8, "sampler": sharded(64)}, 0, 0),
        (64, {"batch_size": 8, "sampler": sharded(64)}, 7, 2),
        (66, {"batch_sampler": Filled(SequentialSampler(range(66)), 8, False)}, 0, 0),
        (66, {"batch_sampler": [[0, 1], [2]]}, 0, None),
        (66, {"batch_size": None}, 0, 0),
    ],
)
def test_what_is_left_follows_from_the_samples_of_a_rank_and_the_batch_size(
    samples: int, options: dict[str, object], ranks_of_job: int, left: int | None
) -> None:
    loader: DataLoader[int] = DataLoader(torch.arange(samples), **options)
    assert short_batch_samples(iter(loader), ranks_of_job) == left


def test_nothing_tells_how_long_a_stream_is() -> None:
    assert short_batch_samples(iter(DataLoader(Stream(), batch_size=4)), 0) is None
    assert short_batch_samples(iter(DataLoader(Stream(), batch_size=4, drop_last=True)), 0) == 0


# Batches of several ranks as one: structures that tensors stand in, and what cannot be joined.


class Pair(NamedTuple):
    x: Any
    y: Any


def test_tensors_are_joined_wherever_they_stand() -> None:
    first = {"x": torch.zeros(2, 3), "rest": [Pair(torch.zeros(2), torch.ones(2)), ("a", "b")], "scale": 0.5}
    second = {"x": torch.ones(1, 3), "rest": [Pair(torch.ones(1), torch.ones(1)), ("c",)], "scale": 0.5}
    whole = joined([first, second], torch)
    assert whole["x"].shape == (3, 3) and whole["x"][2].sum() == 3
    assert isinstance(whole["rest"][0], Pair) and whole["rest"][0].x.tolist() == [0, 0, 1]
    assert whole["rest"][1] == ("a", "b", "c") and whole["scale"] == 0.5


@pytest.mark.parametrize(
    "parts",
    [
        [torch.zeros(2, 3), torch.zeros(2, 4)],
        [torch.zeros(()), torch.zeros(())],
        [{"x": 1}, {"y": 1}],
        [[torch.zeros(1)], [torch.zeros(1)] * 2],
        [0.5, 0.25],
        [torch.zeros(1), [torch.zeros(1)]],
    ],
    ids=["lengths", "no dimension", "keys", "numbers of tensors", "numbers", "types"],
)
def test_what_cannot_be_joined_is_refused(parts: list[Any]) -> None:
    with pytest.raises(CannotJoin):
        joined(parts, torch)


def kept_of(samples: Any, already: int = 0) -> bytes | str:
    feeding = Feeding.__new__(Feeding)
    feeding._torch, feeding._bytes = torch, already
    return feeding._pickled(samples)


def test_of_samples_that_are_parts_of_one_tensor_only_the_parts_are_kept() -> None:
    whole = torch.arange(4_000_000.0).view(-1, 4)
    kept = kept_of([(whole[number], number) for number in range(8)])
    assert isinstance(kept, bytes)
    assert len(kept) < 20_000
    assert [(row.tolist(), number) for row, number in pickle.loads(kept)][7] == ([28.0, 29.0, 30.0, 31.0], 7)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.arange(4.0).to_sparse(),
        torch.arange(100.0)[10:14],
    ],
    ids=["number", "empty", "truth values", "bfloat16", "transposed", "conjugate", "channels last", "sparse", "part"],
)
def test_a_sample_comes_back_as_the_rank_had_it(tensor: torch.Tensor) -> None:
    kept = kept_of([tensor])
    assert isinstance(kept, bytes)
    (back,) = pickle.loads(kept)
    assert (back.dtype, back.shape, back.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert torch.equal(back.to_dense(), tensor.to_dense())
    if tensor.layout is torch.strided and tensor.numel():
        assert back.stride() == tensor.stride()


def test_no_more_is_pickled_than_may_be_kept() -> None:
    assert "more than 256 MB" in kept_of([torch.zeros(100)], already=MOST_BYTES - 100)
    assert "cannot be pickled" in kept_of([lambda: None])


# Which exceptions after a cut pass may be laid to the cut.


def raised(act: Callable[[], Any]) -> Exception:
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def of_this_file(name: str) -> bool:
    return name == __file__


def refuse(kind: type[Exception], text: str) -> None:
    raise kind(text)


@pytest.mark.parametrize(
    "act",
    [
        lambda: 1 / len([]),
        lambda: [][0],
        lambda: dict.fromkeys((1, 2))[3],
        lambda: refuse(RuntimeError, "The size of tensor a (40) must match the size of tensor b (400)"),
    ],
)
def test_less_data_may_be_the_cause(act: Callable[[], Any]) -> None:
    assert may_come_of_less_data(raised(act), of_this_file)


@pytest.mark.parametrize(
    "act",
    [
        lambda: Path(__file__).with_name("absent.txt").read_text(),
        lambda: refuse(RuntimeError, "mat1 and mat2"),
        lambda: {"loss": 1.0}["accu" + "racy"],
        lambda: None + 1,  # type: ignore[operator]
    ],
)
def test_more_data_would_not_have_helped(act: Callable[[], Any]) -> None:
    assert not may_come_of_less_data(raised(act), of_this_file)


def test_a_key_that_the_code_writes_elsewhere_may_have_needed_more_data() -> None:
    scores: dict[str, float] = {}
    assert may_come_of_less_data(raised(lambda: scores["precision"]), of_this_file)
    if scores:
        scores["precision"] = 1.0


def test_a_key_that_stands_where_it_is_asked_for_alone_is_missing_for_good() -> None:
    scores: dict[str, float] = {}
    error = raised(lambda: scores["specificity"])
    assert not may_come_of_less_data(error, of_this_file)


# Workers are few in a rehearsal, above all spawned ones, and the script reads what it has set.
DATA = TensorDataset(torch.zeros(8, 1))


class SharedStream(IterableDataset[int]):  # type: ignore[misc]
    """Divides itself among its workers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("data", "method", "workers", "meanwhile"),
    [
        (DATA, "spawn", 2, 1),
        (DATA, "forkserver", 2, 1),
        (DATA, "fork", 2, 2),
        (DATA, "fork", 32, 4),
        (DATA, "spawn", 1, 1),
        (SharedStream(), "spawn", 2, 2),
        (SharedStream(), "fork", 32, 32),
    ],
)
def test_a_pass_starts_no_more_workers_than_have_something_to_do(
    data: TensorDataset | SharedStream, method: str, workers: int, meanwhile: int
) -> None:
    context = multiprocessing.get_context(method)
    loader: DataLoader[object] = DataLoader(data, num_workers=workers, multiprocessing_context=context)
    with few_workers(loader, torch):
        assert loader.num_workers == meanwhile
    assert loader.num_workers == workers


def _prepare(worker: int) -> None:
    """What a script does in its workers."""


@pytest.mark.parametrize(
    ("method", "options", "meanwhile"),
    [
        ("spawn", {}, 0),
        ("fork", {}, 2),
        ("spawn", {"worker_init_fn": _prepare}, 1),
        ("spawn", {"persistent_workers": True}, 1),
        ("spawn", {"timeout": 30}, 1),
    ],
)
def test_workers_that_were_seen_are_not_spawned_again_unless_the_script_prepares_them(
    method: str, options: dict[str, Any], meanwhile: int
) -> None:
    context = multiprocessing.get_context(method)
    loader: DataLoader[object] = DataLoader(DATA, num_workers=2, multiprocessing_context=context, **options)
    with few_workers(loader, torch, seen=True) as workers:
        assert loader.num_workers == workers == meanwhile
    assert loader.num_workers == 2


# Which uses of ``len(loader)`` look for the end of a pass.
ENDS = (
    "for i, batch in enumerate(loader):\n    if i == len(loader) - 1: validate()",
    "for i, batch in enumerate(loader):\n    if (i + 1) % accumulate == 0 or (i + 1) == len(loader): step()",
    "for i in range(len(loader)):\n    batch = next(batches)",
    "for i in tqdm(range(len(loader)), desc='train'):\n    batch = prefetcher.next()",
    "while done < len(loader):\n    batch = next(batches)\n    done += 1",
    "for batch in loader:\n    step += 1\n    if step % len(loader) == 0: save()",
    "last = len(loader) - 1\nfor i, batch in enumerate(loader):\n    if i == last: print(f'{i}/{last}')",
    "n = len(loader)\nfor i, batch in enumerate(loader):\n    total += loss\n    if i + 1 >= n: show(total / n)",
)
TURNS = (
    "for i in range(len(loader)):\n    batch = next(batches)",
    "n = torch.tensor([len(loader)], device=device)\nfor i in range(int(n)):\n    batch = next(batches)",
    "def steps():\n    return len(loader)\nfor i in range(steps()):\n    batch = next(batches)",
)
AGREED = (
    "n = torch.tensor([len(loader)])\ndist.all_reduce(n, op=dist.ReduceOp.MIN)\n"
    "for i in range(int(n.item())):\n    batch = next(batches)",
    "def common():\n    n = torch.tensor(len(loader)).cuda()\n    all_reduce(n, ReduceOp.MIN)\n    return n.item()\n"
    "steps = common()\nfor i in range(steps):\n    batch = next(batches)",
    "for i in range(min(len(loader), 100)):\n    batch = next(batches)",
    "for i in range(len(loader)):\n    batch = next(batches)\n    if done(): break",
)
TRUTH = (
    "n = torch.tensor([len(loader)])\ndist.all_reduce(n)\nfor i in range(int(n)):\n    batch = next(batches)",
    "n = len(loader)\nn //= 10\nfor i in range(n):\n    batch = next(batches)",
    "def steps():\n    return len(loader)\nfor i in range(steps()):\n    batch = next(batches)\nplan(steps())",
    "schedule = OneCycleLR(optimizer, steps_per_epoch=len(loader), epochs=3)",
    "total = epochs * len(loader)",
    "for i, batch in enumerate(loader):\n    if i % (len(loader) // 10) == 0: log()",
    "every = len(loader) // accumulate",
    "for batch in loader:\n    total += loss\nprint(total / len(loader))",
    "if len(loader) < args.least: raise ValueError",
    "assert len(loader) == 100",
    "assert len(one) == len(other)",
    "table = [rate(i) for i in range(len(loader))]",
    "for i in range(len(loader)):\n    table.append(rate(i))",
    "for i, batch in enumerate(loader):\n    n = len(loader)\n    if i == n - 1: save()\n    rate = n // 10",
    "n = len(loader)\nn = n - 1\nuse(n)",
    "bar = tqdm(total=len(loader))",
    "return_value = len(loader)",
)


def _purposes(source: str, *, alone: bool = True) -> set[str]:
    read_source = read(ast.parse(source), alone=alone)
    calls = [node for node in read_source.parents if isinstance(node, ast.Call)]
    return {purpose_of(call, read_source) for call in calls if getattr(call.func, "id", "") == "len"}


@pytest.mark.parametrize("source", ENDS)
def test_a_loop_that_ends_by_the_length_is_told_where_it_will_end(source: str) -> None:
    assert "" not in _purposes(source)


@pytest.mark.parametrize("source", TURNS)
def test_a_loop_that_draws_as_often_as_the_ranks_own_length_is_known(source: str) -> None:
    assert _purposes(source) == {"turns"}


@pytest.mark.parametrize("source", AGREED)
def test_a_length_that_may_be_another_is_not_the_ranks_own(source: str) -> None:
    assert _purposes(source) == {"end"}


@pytest.mark.parametrize("source", TRUTH)
def test_everything_else_is_told_the_truth(source: str) -> None:
    assert "" in _purposes(source)


def test_what_a_function_returns_is_not_followed_where_other_files_may_call_it() -> None:
    assert _purposes(TURNS[2], alone=False) == {""}


def test_two_questions_on_one_line_are_told_apart_and_wrappers_pass_them_on(tmp_path: object) -> None:
    answers = []
    lengths = Lengths()

    class Loader:
        def __len__(self) -> int:
            answers.append(lengths.purpose(sys._getframe(1)))
            return 100

    class Wrapper:
        def __init__(self) -> None:
            self.loader = Loader()

        def __len__(self) -> int:
            return len(self.loader)

    script = tmp_path / "script.py"  # type: ignore[operator]
    script.write_text(
        textwrap.dedent(
            """
            for i in range(1):
                seen = i % (len(loader) // 10) == 5 or i == len(loader) - 1
            """
        )
    )
    exec(compile(script.read_text(), str(script), "exec"), {"loader": Wrapper(), "__name__": "script"})
    assert answers == (["", "end"] if sys.version_info >= (3, 11) else ["", ""])


@pytest.mark.parametrize("module", ["ignite.engine.engine", "transformers.trainer", "igniter"])
def test_a_trainer_of_a_library_ends_its_epoch_by_the_length(module: str) -> None:
    """Ignite's Engine begins a loader again that ends before the length that it read: its epoch would never end."""
    answers = []

    class Loader:
        def __len__(self) -> int:
            answers.append(Lengths().purpose(sys._getframe(1)))
            return 100

    exec("def length(data):\n    return len(data)\nlength(data)", {"data": Loader(), "__name__": module})
    assert answers == ["" if module == "igniter" else "end"]


# Trainers of Lightning are fitted to the ranks that were started, and only those that train with DDP.
TRAINER = """
class {name}:
    def __init__(self, *, accelerator="auto", strategy="auto", devices="auto", num_nodes=1, precision=None):
        self.made_with = dict(accelerator=accelerator, devices=devices, num_nodes=num_nodes, precision=precision)
"""
Made = Callable[..., dict[str, Any]]


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["pytorch_lightning.trainer.trainer.Trainer", "lightning_fabric.fabric.Fabric"])
def trainer_made_with(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> Iterator[Made]:
    """Imports a package with the names of Lightning's after the hooks are installed, and makes a trainer of it."""
    place, _, name = str(request.param).rpartition(".")
    package = place.partition(".")[0]
    file = tmp_path.joinpath(*place.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    for folder in (tmp_path / package, file.parent):
        (folder / "__init__.py").touch()
    file.write_text(TRAINER.format(name=name))
    for loaded in [one for one in sys.modules if one.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    (tmp_path / "run").mkdir()
    LightningTrainers(Journal(str(tmp_path / "run"), {"job": {"device": device}})).install()
    module = importlib.import_module(place)
    yield lambda **options: getattr(module, name)(**options).made_with
    for loaded in [one for one in sys.modules if one.partition(".")[0] == package]:
        del sys.modules[loaded]


def test_a_ddp_trainer_gets_the_ranks_of_the_rehearsal(trainer_made_with: Made, device: str) -> None:
    asked = {"accelerator": "gpu", "devices": 8, "num_nodes": 4, "precision": "16-mixed"}
    on_cpu = {"accelerator": "cpu", "devices": 2, "num_nodes": 1, "precision": "32-true"}
    expected = on_cpu if device == "cpu" else asked | {"devices": 2, "num_nodes": 1}
    assert trainer_made_with(strategy="ddp_find_unused_parameters_true", **asked) == expected
    assert trainer_made_with(strategy=type("DDPStrategy", (), {})(), **asked) == expected
    assert trainer_made_with()["devices"] == 2


def test_other_strategies_are_left_alone(trainer_made_with: Made) -> None:
    asked = {"accelerator": "gpu", "devices": 8, "num_nodes": 1, "precision": "16-mixed"}
    for strategy in ("fsdp", "deepspeed_stage_2", "ddp_spawn", "ddp_notebook", type("FSDPStrategy", (), {})()):
        assert trainer_made_with(strategy=strategy, **asked) == asked
