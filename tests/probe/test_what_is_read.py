"""What the hooks read of tensors, loaders and passes, and how seldom."""

from __future__ import annotations

import ctypes
import json
import math
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, SequentialSampler, TensorDataset

from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.live.heartbeat import EVERY_STEPS, Gauges
from ddpdoctor.probe.live.hooks import FIRST_AFTER, SAMPLED, HostReads
from ddpdoctor.probe.live.loaders import Pass
from ddpdoctor.probe.live.observer import Observer
from ddpdoctor.probe.live.steps import Source
from ddpdoctor.probe.nonfinite import Sample
from ddpdoctor.probe.observed import HOST_READS, loader_facts
from ddpdoctor.probe.rehearsal.data.loaders import Copies
from ddpdoctor.probe.torch_compat import in_place
from ddpdoctor.record.assembly.assemble import Assembly
from ddpdoctor.record.model import Job
from ddpdoctor.record.streams.measured import Gauge

# Numbers of a tensor are read where they lie only while they lie there.


def test_what_lies_in_memory_is_read_and_nothing_else() -> None:
    whole = torch.arange(8.0)
    assert list(in_place(whole, ctypes.c_float)) == whole.tolist()
    assert list(in_place(whole[6:], ctypes.c_float, 5)) == [6.0, 7.0]
    assert len(in_place(whole.double(), ctypes.c_char)) == 64
    assert len(in_place(torch.zeros(0), ctypes.c_float)) == 0
    whole.untyped_storage().resize_(0)
    assert len(in_place(whole, ctypes.c_float)) == 0


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("value", "is_broken"), [(math.nan, True), (math.inf, True), (-math.inf, True), (-1e300, None), (0.0, False)]
)
def test_a_parameter_is_broken_by_what_is_not_finite(kind: torch.dtype, value: float, is_broken: bool | None) -> None:
    parameter = torch.nn.Parameter(torch.ones(32, dtype=kind))
    sample = Sample(parameter)
    assert not sample.is_broken()
    with torch.no_grad():
        parameter[3] = max(value, torch.finfo(kind).min) if is_broken is None else value
    assert sample.is_broken() == bool(is_broken)
    with torch.no_grad():
        parameter.data = torch.ones(32, dtype=kind)
    assert not sample.is_broken()


# Reads of tensors that a live run samples; here of tensors on the CPU, which are counted as if they were on a GPU.


def _observer(directory: Path) -> Observer:
    journal = Journal(str(directory), {"kind": "run", "project_root": str(Path(__file__).parent)})
    journal.rank = 0
    observer = Observer(journal)
    observer.thread = threading.get_ident()
    return observer


class _OnCpu(HostReads):
    def waits_for_gpu(self, tensor: Any) -> bool:
        return bool(tensor.dtype != torch.int64)


def _reads(observer: Observer) -> HostReads:
    return _OnCpu(observer, torch, torch.compiler.is_compiling)


def _train(observer: Observer, reads: HostReads, steps: int, body: Callable[[int], Any]) -> None:
    """Steps as the hooks see them: a batch, a training forward, the body, a backward, the optimizer."""
    source = Source()
    for number in range(1, steps + 1):
        observer.steps.fetch_begins(source, True, number)
        observer.steps.trains(number)
        reads.forward_begins(observer.steps.current)
        body(number)
        observer.steps.backward_ended(number)
        observer.steps.optimizer_stepped(1, number)


def _told(directory: Path) -> dict[str, tuple[int, int, int]]:
    """By method the calls, the steps with one, and the sampled steps."""
    lines = [line for path in directory.glob("events-*") for line in path.read_text().splitlines()]
    events = [event for event in map(json.loads, lines) if event["event"] == "host_read"]
    assert all(event["site"] >= 0 and event["wait_ns"] >= 0 for event in events)
    return {event["method"]: (event["calls"], event["steps_with"], event["steps"]) for event in events}


def test_reads_of_the_sampled_steps_are_counted_by_line_and_the_class_is_as_it_was(tmp_path: Path) -> None:
    before = dict(torch.Tensor.__dict__)
    observer = _observer(tmp_path)
    reads, value = _reads(observer), torch.tensor(1.5)
    replaced = []

    def body(number: int) -> None:
        replaced.append("item" in torch.Tensor.__dict__)
        assert value.item() == 1.5
        assert (float(value), bool(value), int(value)) == (1.5, True, 1)
        if number % 4 == 0:
            value.tolist()
        torch.tensor(3).item()

    _train(observer, reads, FIRST_AFTER + SAMPLED + 10, body)
    assert dict(torch.Tensor.__dict__) == before
    assert replaced.count(True) == SAMPLED
    told = _told(tmp_path)
    assert told["item"] == told["__float__"] == told["__bool__"] == told["__int__"] == (SAMPLED, SAMPLED, SAMPLED)
    assert told["tolist"] == (SAMPLED // 4, SAMPLED // 4, SAMPLED)


def test_evaluations_other_threads_and_libraries_are_not_counted(tmp_path: Path) -> None:
    observer = _observer(tmp_path)
    reads, value = _reads(observer), torch.tensor(1.5)

    def body(number: int) -> None:
        thread = threading.Thread(target=value.item)
        thread.start()
        thread.join()
        torch.testing.assert_close(value, torch.tensor(1.5))  # compares, and reads the result
        state, observer.steps.state = observer.steps.state, 0
        value.item()
        observer.steps.state = state

    _train(observer, reads, FIRST_AFTER + SAMPLED + 2, body)
    assert _told(tmp_path) == {}


def test_training_that_ends_early_tells_what_it_saw_and_gives_the_methods_back(tmp_path: Path) -> None:
    observer = _observer(tmp_path)
    reads, value = _reads(observer), torch.tensor(1.5)
    _train(observer, reads, FIRST_AFTER + 5, lambda number: f"{value.item()}")
    assert "item" in torch.Tensor.__dict__
    reads.finish(observer.steps.current + 1)
    assert not set(HOST_READS) & torch.Tensor.__dict__.keys()
    calls, steps_with, steps = _told(tmp_path)["item"]
    assert calls == steps_with == steps > 0


def test_an_exception_of_a_read_reaches_the_script_as_it_is(tmp_path: Path) -> None:
    observer = _observer(tmp_path)
    reads = _reads(observer)

    def body(number: int) -> None:
        with pytest.raises(RuntimeError) as raised:
            torch.ones(2).item()
        assert "live/host_reads" not in str([entry.path for entry in raised.traceback])

    _train(observer, reads, FIRST_AFTER + 3, body)
    reads.finish(observer.steps.current + 1)


class Transform:
    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, item: float) -> float:
        return item * self.scale


class Data:
    def __init__(self) -> None:
        self.epoch = 0
        self.order = [2, 1, 0]
        self.served = 0
        self.transform = Transform()

    def place(self, index: int) -> int:
        return self.order[index] + self.epoch

    def __getitem__(self, index: int) -> float:
        return self.transform(self.place(index))

    def report(self) -> int:
        return self.served


def loader_of(data: Any, **options: Any) -> Any:
    return SimpleNamespace(**{"dataset": data, "num_workers": 2, "persistent_workers": True, **options})


def test_what_items_are_made_with_and_was_set_since_the_workers_started_is_named() -> None:
    copies, data = Copies(), Data()
    subset = SimpleNamespace(dataset=data, indices=[0, 1])
    assert copies.changed(loader_of(subset), 0) == []
    data.epoch, data.served = 1, 5
    assert copies.changed(loader_of(subset), 0) == ["epoch"]
    data.order, data.transform.scale = [0, 1, 2], 2.0
    assert copies.changed(loader_of(subset), 0) == ["epoch", "order", "scale"]


def test_nothing_is_old_in_new_workers_and_where_nothing_was_set() -> None:
    copies, data = Copies(), Data()
    loaders = [loader_of(data), loader_of(data, persistent_workers=False), loader_of(data, num_workers=0)]
    for number, loader in enumerate(loaders):
        assert copies.changed(loader, number) == []
    data.served = 3
    assert copies.changed(loaders[0], 0) == []
    data.epoch = 3
    assert [copies.changed(loader, number) for number, loader in enumerate(loaders)] == [["epoch"], [], []]
    assert copies.changed(loader_of(data), 3) == []


DATA = TensorDataset(torch.zeros(12, 1))


class Buckets(BatchSampler):  # type: ignore[misc]
    """Batches of other sizes than it was told."""


@pytest.mark.parametrize(
    ("loader", "size"),
    [
        (DataLoader(DATA, batch_size=3), 3),
        (DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 5, drop_last=True)), 5),
        (DataLoader(DATA, batch_sampler=Buckets(SequentialSampler(DATA), 5, drop_last=True)), None),
        (DataLoader(DATA, batch_size=None), None),
    ],
)
def test_the_size_of_a_batch_is_told_where_nothing_of_the_users_decides_it(
    loader: DataLoader[torch.Tensor], size: int | None
) -> None:
    assert loader_facts(loader, torch)["batch_size"] == size


def test_a_batch_sampler_is_named_by_its_class_and_torchs_own_by_what_it_draws_from() -> None:
    by_class = loader_facts(DataLoader(DATA, batch_sampler=Buckets(SequentialSampler(DATA), 5, drop_last=True)), torch)
    assert (by_class["sampler_type"], by_class["own_batches"]) == ("Buckets", True)
    plain = loader_facts(
        DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 5, drop_last=True)), torch
    )
    assert (plain["sampler_type"], plain["own_batches"]) == ("SequentialSampler", True)
    assert not loader_facts(DataLoader(DATA, batch_size=3), torch)["own_batches"]


class Shard(BatchSampler):  # type: ignore[misc]
    """Every n-th batch of another batch sampler, as Accelerate makes it."""

    def __init__(self, batches: BatchSampler, num_processes: int) -> None:
        self.batch_sampler, self.num_processes, self.process_index = batches, num_processes, 0
        self.batch_size, self.drop_last = 3, False

    def __len__(self) -> int:
        return len(self.batch_sampler) // self.num_processes


@pytest.mark.parametrize(
    ("sampler", "within"),
    [
        (SequentialSampler(DATA), ""),
        (DistributedSampler(DATA, num_replicas=2, rank=0), "DistributedSampler"),
        (DistributedSampler(DATA, num_replicas=1, rank=0), ""),
    ],
)
def test_a_sampler_that_divides_within_another_one_is_named(sampler: Sampler[int], within: str) -> None:
    loader = DataLoader(DATA, batch_sampler=Shard(BatchSampler(sampler, 3, drop_last=False), 2))
    assert loader_facts(loader, torch)["sampler_within"] == within
    assert loader_facts(DataLoader(DATA, batch_size=3, sampler=sampler), torch)["sampler_within"] == ""


def test_the_seed_of_a_sampler_and_workers_that_stay_are_told() -> None:
    sampler = DistributedSampler(DATA, num_replicas=2, rank=1, seed=7)
    facts = loader_facts(DataLoader(DATA, sampler=sampler, num_workers=1, persistent_workers=True), torch)
    assert (facts["sampler_seed"], facts["persistent"]) == (7, True)
    assert not loader_facts(DataLoader(DATA, num_workers=1), torch)["persistent"]


# Which batches of a pass are looked at more closely.


@pytest.mark.parametrize(("size", "looks"), [(2, {0, 2}), (3, {0, 1}), (None, {0})])
def test_a_pass_looks_at_its_first_batch_and_at_those_with_wanted_samples(size: int | None, looks: set[int]) -> None:
    current = Pass(1, 0, 0, array("q", [5, 7, 0, 3]), 0)
    current.batch_size, current.wanted = size, frozenset({7, 9})
    current.wants(0)
    assert current.drawn is not None
    current.drawn.extend([9, 8])
    current.wants(4)
    assert current.looks == looks


def test_a_pass_whose_indices_are_not_kept_is_looked_at_once() -> None:
    current = Pass(1, 0, 0, None, 0)
    current.batch_size, current.wanted = 2, frozenset({1})
    current.wants(0)
    assert current.looks == {0}


def test_the_newest_total_of_each_name_is_in_the_record(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path), {"kind": "rehearsal"})
    journal.event("process", pid=journal.pid, parent=1, kind="start", rank=3)
    gauges, spent = Gauges(journal), [500]
    gauges.add("garbage collection", "ns", lambda: spent[0])
    gauges.look(0)
    for step in range(1, 2 * EVERY_STEPS + 2):
        spent[0] += 100
        gauges.look(step)
    gauges.look(2 * EVERY_STEPS + 2, last=True)
    assembly = Assembly(tmp_path)
    assembly.poll()
    steps = 2 * EVERY_STEPS + 1
    (gauge,) = assembly.record(Job(kind="run")).gauges
    assert gauge == Gauge(
        rank=gauge.rank, name="garbage collection", unit="ns", total=2 * EVERY_STEPS * 100, steps=steps
    )
    assert gauge.per_step == 2 * EVERY_STEPS * 100 / steps


def test_nothing_is_written_of_a_rank_that_makes_no_step(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path), {"kind": "rehearsal"})
    gauges = Gauges(journal)
    gauges.add("anything", "count", lambda: 1)
    gauges.look(1, last=True)
    assert "gauge" not in "".join(path.read_text(errors="replace") for path in tmp_path.iterdir())
