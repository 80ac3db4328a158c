"""Which batches of a pass are looked at more closely."""

from __future__ import annotations

from array import array

import pytest

from ddpdoctor.probe.live.loaders import Pass


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
