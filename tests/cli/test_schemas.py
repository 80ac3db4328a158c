"""What the commands write as JSON is what their published schemas say, and no field is unknown to them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from msgspec.structs import replace

from ddpdoctor.catalogue.registry import load, read_catalogue
from ddpdoctor.cli.main import main
from ddpdoctor.cli.report import KeptRun
from ddpdoctor.cli.schema import COMMANDS, Schema, schema_of
from ddpdoctor.diagnosis.performance.run_comparison import compare
from ddpdoctor.equivalence_section import EquivalenceSection
from ddpdoctor.examination import AutopsySection, Examination, FirstCause
from ddpdoctor.finding import Gain
from ddpdoctor.report.explanation import as_json
from ddpdoctor.report.formats import json as json_report
from ddpdoctor.report.formats.json import HEAD, indented, of_result
from ddpdoctor.report.run import compare_text, run_json
from ddpdoctor.what_if.answer import what_if
from ddpdoctor.what_if.links import MeasuredScaling, ScalingRun, points_of
from tests.demo.job import demo_snapshot
from tests.gate.test_html import gated
from tests.report.examples import examination, finding
from tests.report.test_reports import EXAMINATIONS
from tests.what_if.records import EVEN, bucketed, record_of

SECOND_NS = 1_000_000_000


def closed(schema: Any) -> Any:
    """The same, where an object has no other fields than those that are listed."""
    if isinstance(schema, list):
        return list(map(closed, schema))
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    return {"additionalProperties": False, **made} if "properties" in made and "type" in made else made


def dead() -> str:
    cause = finding(role="cause", doubt="it may be another", gain=Gain(speedup=2.0, low=1.5, high=3.0))
    section = AutopsySection(logs=1, first_cause=FirstCause(code="DDP701", name="a", title="b"))
    return json_report.render(replace(examination(), findings=(cause,), autopsy=section))


def of_equal_gradients() -> str:
    section = EquivalenceSection(
        status="differs", kind="scaled", factor=2.0, at=(1,), places=(("mean", "train.py", 3),)
    )
    return json_report.render(replace(examination(), equivalence=section))


def compared() -> str:
    one = record_of(bucketed(2, 60))
    other = record_of(bucketed(2, 60, durations={**EVEN, "forward": 30.0}), workers=2)
    return compare_text.as_json(compare(one, other), [finding()], [finding()], 0.05)


def predicted() -> str:
    slow = bucketed(4, 60, slower={2: {"forward": 30.0}}, durations={**EVEN, "data_wait": 20.0})
    return of_result(what_if(record_of(slow)))


def scaled() -> str:
    runs = [ScalingRun(ranks=ranks, run_directory="/run", step_ns=1e6, samples_per_s=10.0 * ranks) for ranks in (1, 2)]
    return of_result(MeasuredScaling(name="train.py", points=points_of(runs), notes=("a",)))


WRITTEN: dict[str, tuple[str, Callable[[], str]]] = {
    **{build.__name__: ("check", lambda build=build: json_report.render(build())) for build in EXAMINATIONS},  # type: ignore[misc]
    "a gate of two targets": ("gate", lambda: json_report.render(gated())),
    "an autopsy": ("autopsy", dead),
    "gradients of one process": ("check", of_equal_gradients),
    **{
        f"a run after {second} s": (
            "report",
            lambda second=second: run_json.render(demo_snapshot(second * SECOND_NS, SECOND_NS), "/"),  # type: ignore[misc]
        )
        for second in (0, 20, 59)
    },
    "compare": ("compare", compared),
    "what-if": ("what-if", predicted),
    "scaling": ("scaling", scaled),
    "runs": ("runs", lambda: indented({**HEAD, "runs": [KeptRun(name="run-1", directory="/run", size_bytes=1)]})),
    "explain": ("explain", lambda: as_json([load(entry) for entry in read_catalogue().entries])),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_what_the_schema_says_and_nothing_else(name: str) -> None:
    command, write = WRITTEN[name]
    jsonschema.validate(json.loads(write()), closed(schema_of(command)))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_schema_is_one_and_says_something_of_each_field(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", command]) == 0
    schema: Schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert ": {}" not in json.dumps(schema)


def test_no_section_of_an_examination_is_forgotten() -> None:
    inside = {"root", "fail_on", "parts"}
    assert set(Examination.__struct_fields__) - inside <= set(schema_of("check")["properties"])


def test_a_report_that_lacks_a_field_is_refused() -> None:
    told = json.loads(json_report.render(examination()))
    del told["verdict"]
    with pytest.raises(jsonschema.ValidationError, match="verdict"):
        jsonschema.validate(told, schema_of("check"))
