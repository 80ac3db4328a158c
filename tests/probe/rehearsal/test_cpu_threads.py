"""Who chose the number of threads for torch's computation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpdoctor.probe.rehearsal.surroundings import CpuThreads


@pytest.mark.parametrize(
    ("plan", "sets", "chosen"),
    [({}, False, False), ({}, True, True), ({"threads_chosen": True}, False, True)],
    ids=["nobody", "the script", "the command"],
)
def test_who_asks_for_threads_has_chosen_them(plan: dict[str, Any], sets: bool, chosen: bool) -> None:
    told: list[dict[str, Any]] = []
    journal: Any = SimpleNamespace(
        plan=plan,
        event=lambda name, **fields: told.append({"event": name, **fields}),
        guarded=lambda note, *arguments, harms: note(*arguments),
    )
    own = SimpleNamespace(set_num_threads=torch.set_num_threads, get_num_threads=torch.get_num_threads)
    threads, before = CpuThreads(journal, own), torch.get_num_threads()
    threads.install()
    if sets:
        own.set_num_threads(before)
    threads.note_threads()
    assert told == [{"event": "cpu_threads", "threads": before, "chosen": chosen}]
