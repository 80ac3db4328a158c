"""The command lines that a script has a shell or the system run, as far as the source shows them."""

from __future__ import annotations

import ast

from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import SequenceValue, constant
from ddpdoctor.source.script.module import made_from

WAITED_FOR = frozenset({"os.system", *(f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output"))})
"""Functions that are given a command line, or its words, and return when the program has ended."""
UNSHOWN = "."
"""What stands in a command line for a part that the source does not show."""
_WRITTEN = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple)


def command_line(event: Event) -> str:
    """Return the command that a call runs and waits for; empty when it is another call."""
    if event.name not in WAITED_FOR or not isinstance(event.node, ast.Call):
        return ""
    told = event.argument("args" if event.name != "os.system" else "command", 0)
    words = told.values if isinstance(told, SequenceValue) and not told.open else (told,)
    known = [constant(word) if word is not None else None for word in words]
    if len(words) == 1 and isinstance(known[0], str):
        return known[0]
    given = event.node.args[0] if event.node.args else None
    parts = made_from(given, event.module.body_around(event.node)) if given is not None else ()
    written = next((part for part in parts if isinstance(part, _WRITTEN)), None)
    texts = [
        _literal(event, word) for word in (written.elts if isinstance(written, (ast.List, ast.Tuple)) else [written])
    ]
    if len(texts) == len(known):
        texts = [value if isinstance(value, str) else text for value, text in zip(known, texts, strict=True)]
    return " ".join(texts)


def _literal(event: Event, node: ast.expr | None) -> str:
    """Return the text of a node, with a dot for each part that is not written there."""
    if isinstance(node, ast.Attribute) and event.module.resolve(node) == "sys.executable":
        return "python"
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else UNSHOWN for part in parts)
