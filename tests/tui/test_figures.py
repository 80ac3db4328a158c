"""Numbers as people read them."""

from __future__ import annotations

import pytest

from ddpdoctor.tui.draw import figures

S = 1_000_000_000


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "—"),
        (float("nan"), "—"),
        (0, "0"),
        (0.00512, "0.00512"),
        (5.014, "5.01"),
        (9.999, "10.0"),
        (99.96, "100"),
        (1284.0, "1,280"),
        (12_345.0, "12,300"),
        (-3.14159, "-3.14"),
    ],
)
def test_three_significant_digits(value: float | None, text: str) -> None:
    assert figures.three(value) == text


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (None, "—"),
        (0, "0"),
        (850, "850 ns"),
        (61_234, "61.2 µs"),
        (999_600, "1.00 ms"),
        (198_400_000, "198 ms"),
        (999_960_000, "1.00 s"),
        (119 * S, "119 s"),
        (120 * S, "2 min 00 s"),
        (3_720 * S, "1 h 02 min"),
        (100_000 * S, "1 d 03 h"),
    ],
)
def test_durations(ns: float | None, text: str) -> None:
    assert figures.duration(ns) == text


def test_sizes_shares_and_lists() -> None:
    assert figures.size(4) == "4 B"
    assert figures.size(712_000_000) == "712 MB"
    assert figures.memory(61 * 2**30) == "61.0 GiB"
    assert figures.bandwidth(None) == "—"
    assert figures.bandwidth(21.4e9) == "21.4 GB/s"
    assert (figures.share(0.0432), figures.share(0.324), figures.share(0.0)) == ("4.3%", "32%", "0%")
    assert figures.clock(187 * S) == "3:07"
    assert figures.clock(3_729 * S) == "1:02:09"
