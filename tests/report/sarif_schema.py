"""The part of the SARIF 2.1.0 schema that our logs use, closed: a property that is not here is none of theirs.

Written after section 3 of the standard: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html, with the
limits that GitHub adds.
"""

from __future__ import annotations

from typing import Any


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _array(items: dict[str, Any], at_least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": at_least}


_STRING = {"type": "string"}
_LEVEL = {"enum": ["none", "note", "warning", "error"]}
_POSITIVE = {"type": "integer", "minimum": 1}
_MESSAGE = _object(("text",), text={"type": "string", "minLength": 1})
_DESCRIPTION = _object(("text",), text={"type": "string", "minLength": 1, "maxLength": 1024})
_REGION = _object(
    ("startLine", "startColumn", "endLine", "endColumn"),
    startLine=_POSITIVE,
    startColumn=_POSITIVE,
    endLine=_POSITIVE,
    endColumn=_POSITIVE,
)
_ARTIFACT = _object(
    ("uri",), uri={"type": "string", "pattern": "^(file:///)?[A-Za-z0-9._~%/-]+$"}, uriBaseId={"const": "%SRCROOT%"}
)
_PLACE = _object(("artifactLocation", "region"), artifactLocation=_ARTIFACT, region=_REGION)
_LOCATION = _object(
    ("physicalLocation",), id={"type": "integer", "minimum": 0}, physicalLocation=_PLACE, message=_MESSAGE
)
_STEP = _object(("location",), location=_LOCATION, nestingLevel={"type": "integer", "minimum": 0})
_THREAD_FLOW = _object(("locations",), id=_STRING, message=_MESSAGE, locations=_array(_STEP, 1))
_CODE_FLOW = _object(("threadFlows",), message=_MESSAGE, threadFlows=_array(_THREAD_FLOW, 1))
_RESULT = _object(
    ("ruleId", "ruleIndex", "level", "message", "locations", "partialFingerprints"),
    ruleId=_STRING,
    ruleIndex={"type": "integer", "minimum": 0},
    level=_LEVEL,
    message=_MESSAGE,
    locations=_array(_LOCATION, 1) | {"maxItems": 1},
    relatedLocations=_array(_LOCATION, 1),
    codeFlows=_array(_CODE_FLOW, 1),
    partialFingerprints=_object(
        ("primaryLocationLineHash",), primaryLocationLineHash={"type": "string", "pattern": "^[0-9a-f]{16}:[0-9]+$"}
    ),
)
_RULE = _object(
    ("id", "name", "shortDescription", "fullDescription", "help", "defaultConfiguration", "properties"),
    id=_STRING,
    name=_STRING,
    shortDescription=_DESCRIPTION,
    fullDescription=_DESCRIPTION,
    help=_MESSAGE,
    helpUri={"type": "string", "pattern": "^https://"},
    defaultConfiguration=_object(("level",), level=_LEVEL),
    properties={
        "type": "object",
        "properties": {
            "tags": _array(_STRING) | {"uniqueItems": True},
            "precision": {"enum": ["very-high", "high", "medium", "low"]},
            "problem.severity": {"enum": ["error", "warning", "recommendation"]},
        },
        "required": ["tags", "precision", "problem.severity"],
        "not": {"required": ["security-severity"]},
    },
)
_NOTIFICATION = _object(("message",), level=_LEVEL, message=_MESSAGE)
_RUN = _object(
    ("tool", "results"),
    tool=_object(
        ("driver",),
        driver=_object(("name", "rules"), name=_STRING, semanticVersion=_STRING, rules=_array(_RULE)),
    ),
    columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
    invocations=_array(
        _object(
            ("executionSuccessful",),
            executionSuccessful={"type": "boolean"},
            exitCode={"type": "integer"},
            toolExecutionNotifications=_array(_NOTIFICATION),
        ),
        1,
    ),
    results=_array(_RESULT),
)
SARIF: dict[str, Any] = _object(
    ("$schema", "version", "runs"),
    **{"$schema": {"type": "string", "format": "uri"}, "version": {"const": "2.1.0"}, "runs": _array(_RUN, 1)},
)
