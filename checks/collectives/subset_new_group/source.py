"""Process groups that a loop makes anew in every turn."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.source.events import Event
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.wrapped_models import innermost_loop
from ddpdoctor.source.script.syntax_index import descend, made_from


def repeated_groups(projection: Projection) -> Iterator[Event]:
    """Calls of ``new_group`` in a loop, of ranks that do not depend on its turn, whose group the same turn uses."""
    seen: set[ast.AST] = set()
    collectives = list(projection.in_course("collective"))
    for made in collectives:
        loop = innermost_loop(made)
        if made.name != "new_group" or made.node in seen or not isinstance(loop, ast.For) or made.conditions:
            continue
        around = made.module.parents.get(made.node)
        if not isinstance(around, ast.Assign) or not isinstance(around.targets[0], ast.Name):
            continue
        turns = {node.id for node in descend(loop.target) if isinstance(node, ast.Name)}
        body = made.module.body_around(made.node)
        depends = any(isinstance(node, ast.Name) and node.id in turns for node in made_from(made.node, body))
        used = any(innermost_loop(event) is loop and "group" in event.named for event in collectives)
        if used and not depends:
            seen.add(made.node)
            yield made
