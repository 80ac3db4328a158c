"""Learning rates that every rank steers by a loss of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ALL_RANKS, ExternalObject, options_of
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.job_kind import is_distributed
from ddpdoctor.source.queries.rank_logging import communicates, is_local, is_of_whole_set
from ddpdoctor.source.queries.wrapped_models import training_events
from ddpdoctor.source.script.code_words import uses_part

PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau"
_REDUCERS = ("torchmetrics", "all_avg", "dist_mean")
"""Words of scripts whose metrics may be reduced where it cannot be read."""


def own_plateaus(projection: Projection) -> Iterator[Event]:
    """Steps of a ``ReduceLROnPlateau`` on every rank with a value of the rank's own batches, each once."""
    script = projection.machine.script
    if not is_distributed(projection) or uses_part(script, _REDUCERS):
        return
    seen: set[ast.AST] = set()
    for event in training_events(projection, "step"):
        options = () if event.receiver is None else options_of(event.receiver)
        metric = event.argument("metrics", 0)
        if event.node in seen or event.ranks != ALL_RANKS or metric is None or not is_local(metric):
            continue
        is_plateau = bool(options) and all(isinstance(one, ExternalObject) and one.name == PLATEAU for one in options)
        if is_plateau and not is_of_whole_set(projection, metric) and not communicates(projection, event):
            seen.add(event.node)
            yield event
