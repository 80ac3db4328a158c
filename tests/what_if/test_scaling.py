from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from ddpdoctor.report import blocks
from ddpdoctor.report.run import scaling_text
from ddpdoctor.what_if.links import AllReduce, LinkSweep, MeasuredScaling, ScalingRun, points_of
from tests.what_if.conftest import Ddpdoctor
from tests.what_if.measure import SCRIPT


def run(ranks: int, samples_per_s: float | None, **more: object) -> ScalingRun:
    return ScalingRun(ranks=ranks, step_ns=1e8, samples_per_s=samples_per_s, **more)  # type: ignore[arg-type]


def test_speed_up_and_efficiency_are_against_the_fewest_ranks_that_were_measured() -> None:
    one, two, four = points_of([run(4, 300.0), run(1, 100.0), run(2, 180.0)])
    assert (one.speedup, two.speedup, four.speedup) == (1.0, 1.8, 3.0)
    assert (two.efficiency, four.efficiency) == (0.9, 0.75)
    _, base, later = points_of([run(1, None, failed="the job failed with exit code 1"), run(2, 180.0), run(4, 300.0)])
    assert base.efficiency == 1.0
    assert later.efficiency == pytest.approx(300 / 360)


def test_without_samples_steps_of_equal_batches_are_compared() -> None:
    _, two = points_of([run(1, None), run(2, None)])
    assert two.speedup == 2.0


def test_table_plot_and_svg_show_what_failed_and_what_did_not() -> None:
    sweep = LinkSweep(
        ranks=2, backend="gloo", barrier_s=2e-3, all_reduce=(AllReduce(bytes=8, seconds=1e-3, bus_bytes_per_s=8e3),)
    )
    runs = [run(1, 100.0), run(2, 180.0), run(4, None, failed="the job failed with exit code 1")]
    result = MeasuredScaling(name="<train>.py", points=points_of(runs), sweeps=(sweep,), notes=("a note",))
    text = blocks.rendered(scaling_text.page(result), 80, colour=False)
    assert "90%" in text
    assert "failed with exit code 1" in text
    assert "barrier 2.00 ms" in text
    assert "    2  ####" in text
    svg = ElementTree.fromstring(scaling_text.as_svg(result))
    assert "<train>.py: speed-up by ranks" in [element.text for element in svg.iter()]
    assert sum(element.tag.endswith("circle") for element in svg.iter()) == 2
    assert "hardly" not in text


def test_more_than_the_ranks_can_bring_is_doubted() -> None:
    result = MeasuredScaling(name="train.py", points=points_of([run(1, 100.0), run(2, 280.0)]))
    page = scaling_text.page(result)
    assert page.answer.endswith("doubtful")
    assert "run it again on an idle one" in " ".join(blocks.rendered(page, 80, colour=False).split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give a script"),
        (("nowhere.py",), "nowhere.py does not exist"),
        ((str(SCRIPT), "--ranks", "1,two"), "whole numbers separated by commas"),
        ((str(SCRIPT), "--ranks", "0,2"), "numbers from 1"),
        ((str(SCRIPT), "--export", f"svg={SCRIPT}"), "training.py"),
    ],
)
def test_wrong_usage_gets_one_sentence_and_starts_nothing(
    ddpdoctor: Ddpdoctor, arguments: tuple[str, ...], said: str
) -> None:
    told = ddpdoctor("scaling", *arguments)
    assert told.returncode == 2
    assert said in told.stderr
    assert "rank" not in told.stdout


def test_a_real_job_and_its_links_are_measured(ddpdoctor: Ddpdoctor, place: Path) -> None:
    plot = place / "plot.svg"
    arguments = ("scaling", "--ranks", "2", "--export", f"svg={plot}", "--output-format", "json", str(SCRIPT))
    told = ddpdoctor(*arguments, str(place / "scaled"), "34", "late:straggler=none")
    assert told.returncode == 0, told.stderr
    result = json.loads(told.stdout)
    (point,) = result["points"]
    assert point["run"]["ranks"] == 2
    assert point["run"]["samples_per_s"] > 10
    (sweep,) = result["sweeps"]
    assert sweep["backend"] == "gloo"
    assert 0 < sweep["barrier_s"] < 5
    small, *_, large = sweep["all_reduce"]
    assert large["bus_bytes_per_s"] > 100 * small["bus_bytes_per_s"]
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


@pytest.mark.full
def test_two_ranks_of_a_job_that_sleeps_are_nearly_twice_as_fast_as_one(ddpdoctor: Ddpdoctor, place: Path) -> None:
    arguments = ("scaling", "--ranks", "1,2", "--no-links", "--output-format", "json", str(SCRIPT))
    told = ddpdoctor(*arguments, str(place / "scaled-too"), "60", "input")
    assert told.returncode == 0, told.stderr
    _, two = json.loads(told.stdout)["points"]
    assert 1.6 < two["speedup"] < 2.1


@pytest.mark.full
def test_a_job_that_fails_is_told_and_inconclusive(ddpdoctor: Ddpdoctor, place: Path) -> None:
    broken = place / "broken.py"
    broken.write_text("raise SystemExit('no such data')\n", encoding="utf-8")
    told = ddpdoctor("scaling", "--ranks", "2", "--no-links", str(broken))
    assert told.returncode == 3
    assert "failed with exit code 1" in told.stdout
    assert "no such data" in told.stderr
