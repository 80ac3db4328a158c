"""Where a script wraps a model in ``nn.DataParallel`` and has no DDP beside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.finding import Location
from ddpdoctor.source.projection import project
from ddpdoctor.source.script.module import Module
from ddpdoctor.source.script.script import Script
from ddpdoctor.source.vocabulary import DATA_PARALLEL

_BETTER = ("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard", "deepspeed.initialize")


def data_parallel_uses(script: Script) -> Iterator[Location]:
    """Calls of ``nn.DataParallel`` in the entry script, and those in imported modules that the script comes to."""
    calls = [(module, call, name) for module in script.modules for call, name in module.calls()]
    if any(name.endswith(_BETTER) for _, _, name in calls):
        return
    uses = [(module, call) for module, call, name in calls if name == DATA_PARALLEL and not _dead(module, call)]
    if not uses:
        return
    reached = {event.node for event in project(script).events if event.kind == "data-parallel"}
    for module, call in uses:
        if module is script.entry or call in reached:
            yield module.location(call)


def _dead(module: Module, node: ast.AST) -> bool:
    """Return whether a node stands under ``if False:`` or ``if TYPE_CHECKING:``."""
    inner = node
    for around in module.ancestors(node):
        if isinstance(around, ast.If) and inner in around.body:
            test = around.test
            if isinstance(test, ast.Constant) and not test.value:
                return True
            if isinstance(test, ast.Name) and test.id == "TYPE_CHECKING":
                return True
        inner = around
    return False
