"""What a call's result comes from: what this call was given, and not what an earlier call of the function was given."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.source.interpreter.values import NONE, tags_of
from ddpdoctor.source.projection import project
from ddpdoctor.source.script.script import read_script

BODY = """
    kept.turns = 1
    doubled = values * 2
    shifted = doubled + values - doubled * values
    joined = shifted.view(-1) + doubled.view(-1) + shifted * shifted + doubled * doubled
    bent = joined.relu() + shifted.relu() + doubled.relu() + joined * shifted * doubled
    summed = bent.sigmoid() * joined.sigmoid() + bent * joined + shifted * doubled + bent
"""
ADDS_UP = "    kept.turns, total = 1, 0\n    for turn in range(3):\n        total += values.mean()\n    return total\n"
# How a function is defined, how it is called with a batch, and with what is no batch.
GIVEN = {
    "by place": (f"def work(values):{BODY}    return summed\n", "work(batch)", "work(torch.ones(4))"),
    "by name": (f"def work(*, values):{BODY}    return summed\n", "work(values=batch)", "work(values=torch.ones(4))"),
    "by a default": (f"def work(values=torch.ones(4)):{BODY}    return summed\n", "work(batch)", "work()"),
    "by a star": (
        f"def work(*given):\n    values = given[0]{BODY}    return summed\n",
        "work(*[batch])",
        "work(*[torch.ones(4)])",
    ),
    "in a method": (
        f"def one(self, values):{BODY}    return summed\nclass Work:\n    run = one\nshared = Work()\n",
        "shared.run(batch)",
        "shared.run(torch.ones(4))",
    ),
    "in a call within": (
        f"def inner(values):{BODY}    return summed\ndef work(values):\n    return inner(values) + inner(values)\n",
        "work(batch)",
        "work(torch.ones(4))",
    ),
    "in a generator": (
        f"def work(values):{BODY}    for turn in range(3):\n        yield summed\n",
        "next(work(batch))",
        "next(work(torch.ones(4)))",
    ),
    "in several results": (
        f"def work(values):{BODY}    return summed, bent\n",
        "work(batch)[0]",
        "work(torch.ones(4))[0]",
    ),
    "in a loop": (f"def work(values):\n{ADDS_UP}", "work(batch)", "work(torch.ones(4))"),
}


@pytest.mark.parametrize("way", GIVEN)
def test_a_result_comes_from_what_its_own_call_was_given(way: str, tmp_path: Path) -> None:
    definition, of_batch, of_none = GIVEN[way]
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\nfrom torch.utils.data import DataLoader\n"
        "class Kept: pass\nkept = Kept()\nkept.turns = 0\n"
        f"{definition}for batch in DataLoader(torch.load('data.pt')):\n"
        + "".join(f"    first = {of_batch}\n" for _ in range(5))
        + f"    other = {of_none}\n    again = {of_batch}\n"
    )
    machine = project(read_script(path)).machine
    held = {name: machine.store.get(machine.scope_modules["__main__"], name) for name in ("first", "other", "again")}
    found = {name: {kind for kind, _ in tags_of(value or NONE)} for name, value in held.items()}
    assert {name for name, kinds in found.items() if "batch" in kinds} == {"first", "again"}
