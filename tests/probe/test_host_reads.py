"""Reads of tensors that a live run samples; here of tensors on the CPU, which are counted as if they were on a GPU."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.live.hooks import FIRST_AFTER, SAMPLED, HostReads
from ddpdoctor.probe.live.observer import Observer
from ddpdoctor.probe.live.steps import Source
from ddpdoctor.probe.observed import HOST_READS


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
