"""Takes the text out of lines that a logger or a collector wrote as one JSON object each.

Docker's json-file driver, journald, cloud collectors, and loggers of Python such as structlog: names of the fields are
theirs. The text of an exception is one field with line feeds in it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ddpdoctor.postmortem.prefixes import Prefixed, nanoseconds

_TEXTS = ("message", "msg", "event", "log", "line", "text", "body", "textPayload", "MESSAGE")
_EXCEPTIONS = ("exc_info", "exc_text", "exception", "traceback", "stack_trace", "stacktrace", "error", "stack")
_TIMES = ("timestamp", "time", "ts", "asctime", "@timestamp")
_RANKS = ("rank", "global_rank", "RANK", "process_index")
_HOSTS = ("host", "hostname", "node", "_HOSTNAME")
_MOST_LINES = 1_000
"""Of one object: of a longer text, such as an endless recursion, the beginning and the end."""
_NESTED = ("record", "extra", "fields", "jsonPayload", "kubernetes")
"""Objects inside of the line whose fields count as well."""


def lines_of(line: str) -> list[Prefixed]:
    """Return the lines of text in a line that is a JSON object, with what the object says of all of them; empty if it
    is none.

    The ``text`` of each still has the prefixes that its writer gave it.
    """
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return []
    if not isinstance(found, dict):
        return []
    fields: dict[str, Any] = {}
    for name in _NESTED:
        inner = found.get(name)
        if isinstance(inner, dict):
            fields |= inner
    fields |= found
    texts = [fields[name] for names in (_TEXTS, _EXCEPTIONS) for name in names if isinstance(fields.get(name), str)]
    rank = next((fields[name] for name in _RANKS if name in fields), None)
    number = int(rank) if isinstance(rank, int) or (isinstance(rank, str) and rank.isdecimal()) else None
    host = next((fields[name] for name in _HOSTS if isinstance(fields.get(name), str)), "")
    stamp = next((fields[name] for name in _TIMES if name in fields), "")
    time_ns = nanoseconds(stamp) if isinstance(stamp, str) else 0
    marked = "" if number is None else f"rank{number}"
    lines = "\n".join(dict.fromkeys(texts)).splitlines()
    if len(lines) > _MOST_LINES:
        lines = lines[: _MOST_LINES // 2] + lines[-_MOST_LINES // 2 :]
    return [Prefixed(text, rank=number, host=host, time_ns=time_ns, marked=marked) for text in lines]
