"""The suggestion to divide a data set between the ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.checks.data.shared.epochs_source import loop_of_epochs
from ddpdoctor.checks.data.shared.set_epoch_fix import set_epoch_through
from ddpdoctor.finding import Finding
from ddpdoctor.fix.edits import Edit, Fix, imported, with_keyword
from ddpdoctor.source.interpreter.values import NONE, constant
from ddpdoctor.source.queries.training_loops import Feeding
from ddpdoctor.source.script.module import Module
from ddpdoctor.source.vocabulary import DISTRIBUTED_SAMPLER


def divide(feeding: Feeding, finding: Finding) -> Iterator[Fix]:
    """Give the loader a ``DistributedSampler`` in place of its own order, and set its epoch.

    It is never safe: the batches of a step become others, and an epoch is as many times shorter as there are ranks.
    """
    module, call = feeding.loader.module, feeding.loader.node
    if not isinstance(call, ast.Call) or finding.location is None or len(call.args) > 2:
        return
    dataset = next((word.value for word in call.keywords if word.arg == "dataset"), call.args[0] if call.args else None)
    name = imported(module, DISTRIBUTED_SAMPLER)
    if dataset is None or not isinstance(dataset, (ast.Name, ast.Attribute)) or name is None:
        return
    shuffles = constant(feeding.loader.argument("shuffle", 2) or NONE) is True or "sampler" in feeding.loader.named
    sampler = f"{name[0]}({module.segment(dataset)}{'' if shuffles else ', shuffle=False'})"
    edits = _with_sampler(module, call, sampler)
    if edits is None:
        return
    epochs = loop_of_epochs(feeding)
    told = set_epoch_through(module, call, epochs, "sampler") if shuffles and epochs is not None else None
    yield Fix(
        code=finding.code,
        description=f"give the loader sampler={sampler}" + (", and set its epoch" if told else ""),
        location=finding.location,
        edits=(*edits, *name[1], *((told,) if told else ())),
        safe=False,
    )


def _with_sampler(module: Module, call: ast.Call, sampler: str) -> tuple[Edit, ...] | None:
    """Write the sampler over ``shuffle`` or the sampler that is there, or behind the other arguments."""
    words = {word.arg: word for word in call.keywords}
    if "batch_sampler" in words or None in words or {"sampler", "shuffle"} <= words.keys():
        return None
    old = words.get("sampler") or words.get("shuffle")
    if old is None:
        edit = with_keyword(module, call, "sampler", sampler)
        return None if edit is None else (edit,)
    place = module.location(old)
    return (
        Edit(
            file=str(module.path),
            line=place.line,
            column=place.column,
            end_line=place.end_line,
            end_column=place.end_column,
            replacement=f"sampler={sampler}",
        ),
    )
