"""The real command on runs of real ranks."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from tests.what_if.conftest import Ddpdoctor

_TAGS = re.compile(r"<[^>]+>")


def test_the_straggler_of_a_real_run_is_worth_most_and_the_changed_run_bears_it_out(
    ddpdoctor: Ddpdoctor, late_run: Path, even_run: Path
) -> None:
    told = ddpdoctor("what-if", str(late_run), "--output-format", "json")
    assert told.returncode == 0, told.stderr
    answer = json.loads(told.stdout)
    assert answer["schema"] == 1
    assert abs(answer["error"]) < 0.05
    (change,) = (change for change in answer["changes"] if change["settings"] == {"straggler": "none"})
    assert change["title"] == "rank 1 no slower than the others"
    done = json.loads(ddpdoctor("what-if", str(even_run), "--output-format", "json").stdout)["step_ns"]
    # On a machine that others use, too, one of the two runs may be disturbed.
    assert change["step_ns"]["value"] == pytest.approx(done, rel=0.4)
    assert change["speedup"]["low"] < change["speedup"]["value"] < change["speedup"]["high"]


def test_the_table_names_the_line_the_price_and_the_interval(ddpdoctor: Ddpdoctor, late_run: Path) -> None:
    told = ddpdoctor("what-if", str(late_run))
    assert told.returncode == 0
    assert max(map(len, told.stdout.splitlines())) <= 80
    assert "rank 1 no slower than the others" in told.stdout
    assert "training.py:" in told.stdout.replace("\n          ", "")
    assert "learning rate" in " ".join(told.stdout.split())
    assert "weak scaling" in told.stdout
    assert "Amdahl" in told.stdout


def test_one_combination_is_asked_for(ddpdoctor: Ddpdoctor, late_run: Path) -> None:
    arguments = ("what-if", str(late_run), "--set", "bucket_cap_mb=100", "--set", "ranks=64")
    (change,) = json.loads(ddpdoctor(*arguments, "--output-format", "json").stdout)["changes"]
    assert change["settings"] == {"bucket_cap_mb": 100.0, "ranks": 64}
    assert change["speedup"]["value"] > 2


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("nowhere/run",), 2, "there is no run directory"),
        (("--set", "bucket_cap=3"), 2, "did you mean bucket_cap_mb?"),
        (("--set", "ranks=8", "--set", "nodes=3"), 2, "divided evenly"),
        (("--set", "ranks=8", "--set", "nodes=2"), 3, "internode_gbit_per_s"),
        (("--set", "host_syncs=dropped"), 3, "no reads of results"),
    ],
)
def test_bad_input_gets_one_sentence(
    ddpdoctor: Ddpdoctor, late_run: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    run = () if arguments[0] == "nowhere/run" else (str(late_run),)
    told = ddpdoctor("what-if", *run, *arguments)
    assert told.returncode == code
    assert said in told.stderr
    assert told.stderr.startswith("error: ")
    assert told.stdout == ""


def test_a_run_of_a_newer_version_is_refused(ddpdoctor: Ddpdoctor, place: Path) -> None:
    newer = place / "newer"
    newer.mkdir()
    (newer / "job.json").write_text('{"version": 99}', encoding="utf-8")
    told = ddpdoctor("what-if", str(newer))
    assert told.returncode == 2
    assert "newer ddpdoctor" in told.stderr


@pytest.mark.parametrize("command", ["compare", "what-if"])
def test_a_comparison_and_a_prediction_are_written_as_every_report(
    command: str, ddpdoctor: Ddpdoctor, late_run: Path, even_run: Path, tmp_path: Path
) -> None:
    runs = (str(late_run), str(even_run))[: 2 if command == "compare" else 1]
    text, page, machine = tmp_path / "a.txt", tmp_path / "a.html", tmp_path / "a.json"
    written = ("-o", str(text), "--report", f"html={page}", "--report", f"json={machine}")
    told = ddpdoctor(command, *runs, *written)
    assert told.returncode == 0, told.stderr
    assert told.stdout == ""
    assert "step" in text.read_text()
    shown = html.unescape(_TAGS.sub(" ", page.read_text()))
    assert "<script" not in page.read_text()
    figures = [word for word in text.read_text().partition("\n[ddpdoctor")[0].split() if word[:1].isdigit()]
    assert len(figures) > 20
    assert [word for word in figures if word not in shown] == [], "the page says less than the text"
    assert json.loads(machine.read_text())["tool"]["name"] == "ddpdoctor"
    assert ddpdoctor(command, *runs, *written).returncode == 0, "a report of ours is replaced"
    text.write_text("mine")
    refused = ddpdoctor(command, *runs, *written)
    assert refused.returncode == 2 and "--force" in refused.stderr
    assert ddpdoctor(command, *runs, *written, "--force").returncode == 0


def test_the_command_exits_with_1_on_a_regression(ddpdoctor: Ddpdoctor, late_run: Path, even_run: Path) -> None:
    slower = ddpdoctor("compare", str(even_run), str(late_run))
    assert slower.returncode == 1, slower.stderr
    assert slower.stdout.startswith("SLOWER")
    assert "straggler (DDP403)" in slower.stdout
    faster = ddpdoctor("compare", str(late_run), str(even_run), "--output-format", "json")
    assert faster.returncode == 0
    told = json.loads(faster.stdout)
    assert not told["regression"]
    assert told["step"]["high"] < 1
    assert "DDP403" in [finding["code"] for finding in told["findings_gone"]]
    assert "arguments" in [entry["name"] for entry in told["settings"]]
    assert ddpdoctor("compare", str(even_run), str(late_run), "--allowed-growth", "900%").returncode == 0


def test_a_run_compared_with_itself_has_not_changed(ddpdoctor: Ddpdoctor, late_run: Path) -> None:
    told = ddpdoctor("compare", str(late_run), str(late_run))
    assert told.returncode == 0
    assert told.stdout.startswith("NO CHANGE")
    assert ddpdoctor("compare", str(late_run), "nowhere/run").returncode == 2
