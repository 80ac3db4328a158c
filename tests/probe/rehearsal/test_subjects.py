"""Which loop a collective is a turn of."""

from __future__ import annotations

import ast

import pytest

from ddpdoctor.probe.rehearsal.collective_hook import puts_together
from ddpdoctor.probe.rehearsal.loop_subjects import loop_targets

LOOPS = {
    "for key in names:\n    dist.all_reduce(values[key])  # here": ("key",),
    "for name, value in values.items():\n    dist.all_reduce(value)  # here": ("name", "value"),
    "for key in names:\n    value = values[key] / 2\n    dist.all_reduce(value)  # here": ("key",),
    "[dist.all_reduce(value) for value in values]  # here": ("value",),
    "for group in groups:\n    for p in group:\n        dist.all_reduce(p.grad)  # here": ("p",),
    "for step in range(3):\n    dist.all_reduce(loss)  # here": (),
    "for key in names:\n    pass\ndist.all_reduce(values[key])  # here": (),
    "def reduce(value):\n    dist.all_reduce(value)  # here\nfor value in values:\n    reduce(value)": (),
}


@pytest.mark.parametrize("source", LOOPS)
def test_the_loop_is_the_one_whose_variable_the_call_is_given(source: str) -> None:
    line = next(number for number, text in enumerate(source.splitlines(), 1) if text.endswith("# here"))
    assert loop_targets(ast.parse(source), line) == LOOPS[source]


STACKED = {
    "values = torch.stack(list(losses.values()))\ndist.all_reduce(values)  # here": True,
    "def reduce(losses):\n    values = torch.cat([losses[k] for k in keys])\n    dist.all_reduce(values)  # here": True,
    "values = torch.stack(parts)\ndef reduce(values):\n    dist.all_reduce(values)  # here": False,
    "values = torch.zeros(3)\ndist.all_reduce(values)  # here": False,
    "dist.all_reduce(values[0])  # here": False,
}


@pytest.mark.parametrize("source", STACKED)
def test_what_is_reduced_was_put_together_in_the_same_function(source: str) -> None:
    line = next(number for number, text in enumerate(source.splitlines(), 1) if text.endswith("# here"))
    assert puts_together(ast.parse(source), line) is STACKED[source]
