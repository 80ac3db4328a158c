"""JSON schema of the report, version 1: what programs may rely on."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _one_of(*values: str) -> Schema:
    return {"enum": list(values)}


TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
SECONDS: Schema = {"type": "number", "minimum": 0}
LINE: Schema = {"type": "integer", "minimum": 1}
BASIS = _one_of("source", "rehearsal", "run", "log", "dump")
LOCATION = _object(
    file=TEXT,
    line=LINE,
    column=LINE,
    end_line={"type": ["integer", "null"]},
    end_column={"type": ["integer", "null"]},
    function=TEXT,
)
FACT = _object(
    text=TEXT,
    basis=BASIS,
    numbers={"type": "object", "additionalProperties": {"type": "number"}},
    rank={"type": ["integer", "null"]},
    location={"anyOf": [LOCATION, {"type": "null"}]},
    stack=_list(_object(file=TEXT, line={"type": "integer"}, function=TEXT)),
)
FINDING = _object(
    code=TEXT,
    name=TEXT,
    severity=_one_of("error", "warning", "advice"),
    title=TEXT,
    ranks=_list(COUNT),
    locations=_list(LOCATION),
    basis=_list(BASIS),
    evidence=_list(FACT),
    remedy=TEXT,
    unconfirmed=TEXT,
    stress=TEXT,
    fingerprint={"type": "string", "pattern": "^[0-9a-f]{16}$"},
)
REPORT = _object(
    schema={"const": 1},
    tool=_object(name={"const": "ddpdoctor"}, version=TEXT),
    target=TEXT,
    verdict=_one_of("clean", "findings", "inconclusive"),
    exit_code={"enum": [0, 1, 3]},
    complete={"type": "boolean"},
    recognised={"type": "boolean"},
    source=_object(status=_one_of("read", "failed"), files=COUNT, seconds=SECONDS, notes=_list(TEXT)),
    rehearsal=_object(
        status=_one_of("completed", "stopped", "failed", "skipped"),
        reason=TEXT,
        hint=TEXT,
        output=TEXT,
        ranks=COUNT,
        ranks_of_job={"type": ["integer", "null"], "minimum": 1},
        steps=COUNT,
        seconds=SECONDS,
        device=TEXT,
        unreached=_list(
            _object(file=TEXT, line=COUNT, end_line=COUNT, function=TEXT, calls=_list(TEXT), waits_for=TEXT)
        ),
        batch_size={"anyOf": [COUNT, {"type": "null"}]},
        overlay={"type": "boolean"},
        notes=_list(TEXT),
    ),
    findings=_list(FINDING),
    refuted=_list(_object(code=TEXT, name=TEXT, location={"anyOf": [LOCATION, {"type": "null"}]}, reason=TEXT)),
    outcomes=_list(
        _object(
            code=TEXT,
            name=TEXT,
            state=_one_of("findings", "passed", "nothing-to-look-at", "not-evaluated", "bound-hit"),
            reason=TEXT,
            by_nature={"type": "boolean"},
        )
    ),
    notes=_list(TEXT),
)
