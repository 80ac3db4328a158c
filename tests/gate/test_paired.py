"""Step times in pairs: what a pair shares cancels out, and only a whole interval above the budget is red."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import pytest

from ddpdoctor.examine.run_gate import FEWEST_PAIRS, compare_times
from ddpdoctor.gate import step_time_growth
from tests.gate.command import report
from tests.gate.scripts import HEALTHY

ALLOWED = 0.05
MACHINE = (1.0, 3.0, 0.7, 2.0, 1.4)
"""How slow the machine is during each pair."""


def pairs(change: float, noise: float = 0.0) -> list[tuple[list[float], list[float]]]:
    """Steps of 10 ms on a machine that changes from pair to pair; the second side is ``change`` times as slow."""
    found = []
    for index, slow in enumerate(MACHINE):
        tilt = noise * (-1) ** index
        found.append(([10.0 * slow] * 4 + [500.0], [10.0 * slow * change * (1 + tilt)] * 4 + [500.0]))
    return found


def test_what_the_machine_does_to_both_sides_of_a_pair_cancels_out() -> None:
    times = compare_times(pairs(1.2), ALLOWED)
    assert times.slower
    assert times.change == pytest.approx(0.2)
    assert times.low == pytest.approx(0.2)
    assert times.high == pytest.approx(0.2)
    assert (times.pairs, times.steps) == (5, 25)


def test_an_interval_that_reaches_into_the_budget_is_not_slower() -> None:
    times = compare_times(pairs(1.2, noise=0.25), ALLOWED)
    assert times.change > ALLOWED
    assert times.low < ALLOWED < times.high
    assert not times.slower


@pytest.mark.parametrize("change", [0.5, 1.0, 1.04])
def test_what_lies_within_the_budget_is_not_slower(change: float) -> None:
    times = compare_times(pairs(change, noise=0.01), ALLOWED)
    assert times.low < change - 1 < times.high
    assert not times.slower


def test_the_interval_is_students_of_the_logarithms() -> None:
    before, now = [10.0], (11.0, 12.0, 13.0)
    times = compare_times([(before, [one]) for one in now], ALLOWED)
    logs = [math.log(one / 10) for one in now]
    centre = sum(logs) / 3
    spread = math.sqrt(sum((one - centre) ** 2 for one in logs) / 2)
    assert times.low == pytest.approx(math.exp(centre - 4.303 * spread / math.sqrt(3)) - 1)
    assert times.high == pytest.approx(math.exp(centre + 4.303 * spread / math.sqrt(3)) - 1)


def test_too_few_pairs_say_nothing() -> None:
    few = pairs(9.0)[: FEWEST_PAIRS - 1]
    times = compare_times([*few, ([], [1.0]), ([1.0], [])], ALLOWED)
    assert not times.slower
    assert (times.low, times.high) == (-1.0, math.inf)
    assert times.note == "2 pairs were timed, and 3 are needed to tell a change from noise"


def test_the_finding_names_both_times_the_interval_and_the_budget() -> None:
    found = step_time_growth.finding(compare_times(pairs(1.2), ALLOWED), "main")
    assert (found.code, found.title) == ("DDP903", "a step takes 20% longer than in main")
    assert "10.0 ms" not in found.title
    (fact,) = found.evidence
    assert "14.0 ms a step before, 16.8 ms now; 95% interval +20.0% to +20.0%, allowed 5%" in fact.text


@pytest.mark.full
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(("pause", "codes"), [(0.0, []), (0.1, ["DDP903"])])
def test_a_slower_step_is_red_on_real_ranks_and_an_equal_one_is_not(
    tmp_path: Path, pause: float, codes: list[str]
) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    script = f"import time\n{HEALTHY}".replace(
        "            loss.backward()", "            time.sleep(0.05)\n            loss.backward()"
    )
    assert "time.sleep(0.05)" in script
    (tmp_path / "train.py").write_text(script)
    git("init", "-q")
    git("add", "train.py")
    git("commit", "-q", "-m", "as it was")
    (tmp_path / "train.py").write_text(script.replace("time.sleep(0.05)", f"time.sleep({0.05 + pause})"))
    code, found = report("train.py", "--against", "HEAD", "--allowed-time-growth", "30%", cwd=tmp_path)
    assert [one["code"] for one in found["findings"]] == codes, found
    assert code == int(bool(codes))
    assert found["gate"]["times"]["slower"] is bool(codes)
