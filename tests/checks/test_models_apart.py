"""Models that the ranks build of the same things in other orders: DDP compares only the shapes."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from ddpdoctor.checks.collectives import data_dependent_divergence
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.probe.observed import _texts_of
from tests.checks.replicas import WRAP_LINE, Replicas


def said(by_rank: tuple[dict[str, Any], ...]) -> list[Finding]:
    job = Replicas(len(by_rank), wrapped=False)
    for rank, fields in enumerate(by_rank):
        wrap = job.wrapped(rank)
        if "parameters" in fields:
            fields = {**fields, "parameters": tuple(wrap.parameters[place] for place in fields["parameters"])}
        job.add("wraps", msgspec.structs.replace(wrap, **fields))
    return [one for one in data_dependent_divergence.in_run(job.seen()) if isinstance(one, Finding)]


def test_parameters_in_another_order_are_an_error() -> None:
    (found,) = said(({"parameters": (0, 1)}, {"parameters": (0, 1)}, {"parameters": (1, 0)}))
    assert found.severity == Severity.ERROR
    assert found.ranks == (0, 2)
    assert found.locations[0].line == WRAP_LINE
    assert "the parameters of Net in different orders" in found.title


def test_a_list_of_texts_in_another_order_is_a_warning_that_names_the_first_item_that_differs() -> None:
    (found,) = said(({"texts": {"fields": ("a", "b", "c")}}, {"texts": {"fields": ("a", "c", "b")}}))
    assert found.severity == Severity.WARNING
    assert "`fields` of Net in different orders" in found.title
    assert "number 1 is `b` on rank 0, `c` on rank 1" in found.evidence[0].text


def test_the_same_order_and_other_texts_are_nothing() -> None:
    assert not said(({"texts": {"fields": ("a", "b")}},) * 2)
    assert not said(({"texts": {"paths": ("rank 0", "b")}}, {"texts": {"paths": ("rank 1", "b")}}))
    assert not said(({"texts": {"fields": ("a", "b")}}, {}))


def test_a_module_tells_the_lists_of_texts_of_its_parts() -> None:
    inner, outer = torch.nn.Linear(1, 1), torch.nn.Sequential()
    inner.names, inner.sizes, inner.chosen = ["b", "a"], [1, 2], {"x", "y"}
    outer.fields, outer.one = {"u": 1, "t": 2}, ["alone"]
    outer.append(inner)
    assert dict(_texts_of(outer)) == {"fields": ["u", "t"], "0.names": ["b", "a"]}
