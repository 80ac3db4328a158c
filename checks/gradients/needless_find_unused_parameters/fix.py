"""The suggestion to stop searching for unused parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.finding import Finding
from ddpdoctor.fix.edits import Fix, without_keyword
from ddpdoctor.source.script.script import Script

_OPTION = "find_unused_parameters"


def stop_searching(script: Script, finding: Finding) -> Iterator[Fix]:
    """Leave ``find_unused_parameters`` out of the wrap; never safe, because a path that was not seen may need it."""
    for module in script.modules:
        if finding.location is None or str(module.path) != finding.location.file:
            continue
        for node in module.nodes:
            if isinstance(node, ast.Call) and module.location(node) == finding.location:
                edit = without_keyword(module, node, _OPTION)
                if edit is not None:
                    yield Fix(
                        code=finding.code,
                        description=f"omit {_OPTION}",
                        location=finding.location,
                        edits=(edit,),
                        safe=False,
                    )
                return
