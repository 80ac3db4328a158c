"""Files that ranks wait for in a loop, in place of a collective."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import msgspec

from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.file_uses import FileUse, writes
from ddpdoctor.source.queries.sync_points import function_around
from ddpdoctor.source.script.module import Module
from ddpdoctor.source.script.syntax_index import descend, last_name
from ddpdoctor.source.script.text_search import mentions_any

_ASKS = frozenset({"exists", "isfile", "is_file"})


class PolledFile(msgspec.Struct, frozen=True, eq=False):
    """A loop that sleeps until a file is there which another rank writes in place."""

    module: Module
    loop: ast.While
    path: str
    """Source of the path."""
    write: FileUse


def polled_files(projection: Projection) -> Iterator[PolledFile]:
    """Loops ``while not exists(path): sleep`` for a file that some rank of the same job writes under that path."""
    script = projection.machine.script
    if not mentions_any(script, ("sleep(",)) or not mentions_any(script, ("exists()", "exists(", "is_file")):
        return
    if mentions_any(script, ("filelock", "FileLock", "os.replace", "os.rename")):
        return
    written = [use for use in writes(projection) if use.event.guards]
    for module in script.modules if written else ():
        for node in module.index.of(ast.While):
            path = _waited_for(node)
            write = next((use for use in written if _is_that_file(use, module, node, path)), None) if path else None
            if write is not None:
                yield PolledFile(module, node, path, write)


def _waited_for(loop: ast.While) -> str:
    """The source of the path that a loop asks for, if it does nothing but sleep meanwhile."""
    test = loop.test
    if not isinstance(test, ast.UnaryOp) or not isinstance(test.op, ast.Not) or not isinstance(test.operand, ast.Call):
        return ""
    sleeps = any(last_name(node.func) == "sleep" for node in descend(loop) if isinstance(node, ast.Call))
    call = test.operand
    if not sleeps or last_name(call.func) not in _ASKS:
        return ""
    if call.args:
        return ast.unparse(call.args[0])
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _is_that_file(use: FileUse, module: Module, loop: ast.While, path: str) -> bool:
    same_function = function_around(use.event.module, use.event.node) is function_around(module, loop)
    return use.event.module is module and same_function and use.source == path
