"""``ddpdoctor schema``: JSON Schemas of what the commands write, built from the very structs that they write.

A program may rely on what is listed here; a later version of schema 1 may add fields, and takes none away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, get_args

import click
import msgspec
from msgspec import inspect

from ddpdoctor.check import Outcome
from ddpdoctor.cli.options import help_option
from ddpdoctor.cli.output import file_options
from ddpdoctor.equivalence_section import EquivalenceSection
from ddpdoctor.examination import (
    AutopsySection,
    GateSection,
    RefutedSuspicion,
    RehearsalSection,
    SourceSection,
    TimeComparison,
    Verdict,
)
from ddpdoctor.finding import Finding, Gain, Location
from ddpdoctor.report.formats.json import LEFT_OUT, RENAMED

Schema = dict[str, Any]
DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TEXT: Schema = {"type": "string"}
_WHOLE: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_TOOL: Schema = {
    "type": "object",
    "properties": {"name": {"const": "ddpdoctor"}, "version": _TEXT},
    "required": ["name", "version"],
}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(properties: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    return {"type": "object", "properties": {**properties, **(optional or {})}, "required": list(properties)}


def _document(properties: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    return _object({"schema": {"const": 1}, "tool": _TOOL, **properties}, optional)


_NULLABLE: Mapping[type, tuple[str, ...]] = {
    Location: ("end_line", "end_column"),
    TimeComparison: ("low", "high"),
    RehearsalSection: ("ranks_of_job",),
}
"""Fields that are null where what they hold says that nothing is known."""


def _fields(kind: type[msgspec.Struct], *, reported: bool) -> dict[str, Schema]:
    """Return the schema of each field; ``reported``: as a report of an examination writes it."""
    left_out = LEFT_OUT.get(kind, frozenset()) if reported else frozenset()
    nullable = _NULLABLE.get(kind, ()) if reported else ()
    found = {}
    for field in inspect.type_info(kind).fields:  # type: ignore[attr-defined]
        if field.name not in left_out:
            schema = _of(field.type, reported=reported)
            name = RENAMED.get(field.name, field.name) if reported else field.encode_name
            found[name] = _or_null(schema) if field.name in nullable else schema
    return found


def _of(kind: inspect.Type, *, reported: bool) -> Schema:
    match kind:
        case inspect.StructType():
            return _finding() if kind.cls is Finding else _object(_fields(kind.cls, reported=reported))
        case inspect.VarTupleType() | inspect.ListType() | inspect.FrozenSetType() | inspect.CollectionType():
            return _list(_of(kind.item_type, reported=reported))
        case inspect.TupleType():
            items = [_of(item, reported=reported) for item in kind.item_types]
            return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
        case inspect.DictType():
            return {"type": "object", "additionalProperties": _of(kind.value_type, reported=reported)}
        case inspect.UnionType():
            return {"anyOf": [_of(one, reported=reported) for one in kind.types]}
        case inspect.LiteralType():
            return {"enum": list(kind.values)}
        case inspect.EnumType():
            return {"enum": [one.value for one in kind.cls]}
        case inspect.NoneType():
            return {"type": "null"}
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.IntType():
            return _WHOLE
        case inspect.FloatType():
            return _NUMBER
        case inspect.StrType():
            return _TEXT
    return {"type": ["string", "number", "boolean", "null"]}


def _finding() -> Schema:
    gain = _object(_fields(Gain, reported=False))
    return _object(_fields(Finding, reported=True), {"gain": gain, "role": {"enum": ["cause", "echo"]}, "doubt": _TEXT})


def _examination() -> Schema:
    return _document(
        {
            "target": _TEXT,
            "verdict": {"enum": list(get_args(Verdict))},
            "exit_code": {"enum": [0, 1, 2, 3, 130]},
            "complete": {"type": "boolean"},
            "recognised": {"type": "boolean"},
            "source": _object(_fields(SourceSection, reported=True)),
            "rehearsal": _object(_fields(RehearsalSection, reported=True)),
            "findings": _list(_finding()),
            "refuted": _list(_object(_fields(RefutedSuspicion, reported=True))),
            "outcomes": _list(_object(_fields(Outcome, reported=True))),
            "notes": _list(_TEXT),
        },
        {
            "equivalence": _object(_fields(EquivalenceSection, reported=True)),
            "autopsy": _object(_fields(AutopsySection, reported=True)),
            "gate": _object(_fields(GateSection, reported=True)),
            "targets": _list({"$ref": "#"}),
            "scripts": _list(_TEXT),
        },
    )


def _run() -> Schema:
    from ddpdoctor.diagnosis.performance.summary import Phases, RankSummary, RunVerdict, Traffic
    from ddpdoctor.monitor.snapshot import Snapshot
    from ddpdoctor.record.streams.measured import Gpu, GpuSample
    from ddpdoctor.report.run.run_json import FACTS, FIGURES, VERDICT

    figure, whole, text = _or_null(_NUMBER), _or_null(_WHOLE), _or_null(_TEXT)
    phases = {name.removesuffix("_ns"): figure for name in Phases.__struct_fields__ if name != "step_ns"}
    sample, gpu = _fields(GpuSample, reported=False), _fields(Gpu, reported=False)
    shown = ("utilisation_percent", "memory_used_bytes", "temperature_c", "power_w", "sm_clock_mhz", "throttle_reasons")
    known = {name: gpu[name] for name in ("index", "uuid", "name", "memory_total_bytes", "power_limit_w")}
    of_rank = _fields(RankSummary, reported=False)
    rank = {
        "rank": _WHOLE,
        "host": text,
        "state": _TEXT,
        "step_ms": _object({"p50": figure, "p95": figure}),
        "phases_ms": _or_null(_object(phases)),
        "waiting_ms": figure,
        "late_ms": figure,
        "late_phase": _TEXT,
        **{name: _or_null(of_rank[name]) for name in ("overlap_ratio", "bytes_per_step", "collectives_per_step")},
        "samples_per_s": figure,
        "gpu": _or_null(_object({**known, **{name: _or_null(sample[name]) for name in shown}})),
    }
    snapshot = _fields(Snapshot, reported=False)
    finding = _finding()
    finding["properties"] |= {"since_ns": _WHOLE, "until_ns": whole}
    verdict = _fields(RunVerdict, reported=False)
    return _document(
        {
            "verdict": _object({name: verdict[name] for name in VERDICT}),
            **{name: snapshot[name] for name in FACTS},
            "measured_steps": _WHOLE,
            "seconds": figure,
            **{name: snapshot[name] for name in FIGURES},
            "ranks": _list(_object(rank)),
            "traffic": _list(_object(_fields(Traffic, reported=False))),
            "findings": _list(finding),
            "notes": _list(_TEXT),
        }
    )


def _runs() -> Schema:
    from ddpdoctor.cli.report import KeptRun

    return _document({"runs": _list(_object(_fields(KeptRun, reported=False)))})


def _compare() -> Schema:
    from ddpdoctor.diagnosis.performance.run_comparison import RunComparison

    known = _list(_object(dict.fromkeys(("code", "name", "title", "fingerprint"), _TEXT)))
    settings = _list(_object(dict.fromkeys(("name", "before", "after"), _TEXT)))
    told = {"regression": {"type": "boolean"}, "allowed": _NUMBER, **_fields(RunComparison, reported=False)}
    return _document({**told, "settings": settings, "findings_come": known, "findings_gone": known})


def _result(module: str, name: str) -> Schema:
    return _document(_fields(getattr(import_module(module), name), reported=False))


def _explain() -> Schema:
    texts = dict.fromkeys(("code", "name", "summary", "documentation"), _TEXT)
    words = {"type": "object", "additionalProperties": _TEXT}
    return _list(_object({**texts, "severity": words, "sees": _list(_TEXT), "needs": _list(_TEXT), "sections": words}))


_MADE: Mapping[str, Callable[[], Schema]] = {
    "check": _examination,
    "gate": _examination,
    "autopsy": _examination,
    "profile": _run,
    "report": _run,
    "runs": _runs,
    "compare": _compare,
    "what-if": partial(_result, "ddpdoctor.what_if.scenario", "WhatIf"),
    "scaling": partial(_result, "ddpdoctor.what_if.links", "MeasuredScaling"),
    "explain": _explain,
}
COMMANDS = tuple(_MADE)
"""The commands that write JSON."""


def schema_of(command: str) -> Schema:
    """Return the schema of what a command writes with ``--output-format json``."""
    return {"$schema": DIALECT, "title": f"ddpdoctor {command} --output-format json", **_MADE[command]()}


@click.command(add_help_option=False)
@click.argument("command", type=click.Choice(COMMANDS), metavar="COMMAND")
@file_options
@help_option()
def schema(command: str, write: Callable[[str], None]) -> None:
    """Print the JSON Schema of the JSON that COMMAND writes."""
    encoded = msgspec.json.format(msgspec.json.encode(schema_of(command)), indent=2)
    write(encoded.decode() + "\n")
