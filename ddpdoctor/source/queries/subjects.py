"""What of a script checks look at, and what of it was not understood: where an outcome may say "passed".

A check that names its subjects has passed where all of them were found and followed, has nothing to look at where the
script has none of them, and was not evaluated where a gap may hide them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from ddpdoctor.check import Subject
from ddpdoctor.files import regex
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ExternalObject, Unknown, Value, constant, options_of, tags_of
from ddpdoctor.source.projection import Projection, project
from ddpdoctor.source.queries.job_kind import frameworks, is_distributed, speaks_of_devices
from ddpdoctor.source.queries.training_loops import feedings, is_averaged, through_ddp, unread_loss
from ddpdoctor.source.script.module import Module, all_once, argument_of, last_name, once_each
from ddpdoctor.source.script.script import Script, says
from ddpdoctor.source.torch_model.ddp import UNREAD_BACKWARD

_OF_TRAINING: tuple[Subject, ...] = ("wrap", "model", "training", "loss", "training-loader", "sampler")
MOST_GAPS = 3
"""Gaps that a reason names; the first is mostly the cause of the others."""


class Gap(msgspec.Struct, frozen=True):
    """Something that was not understood."""

    text: str
    """A clause with the place: ``the loss comes from calc_loss (train.py:41), which was not followed``."""
    hides: tuple[Subject, ...]
    """What may be behind it."""
    hides_words: bool = False
    """What is behind it may use words that are nowhere in the code that was read."""


class LookedAt(msgspec.Struct, frozen=True):
    """What became of the subjects of a check that found nothing."""

    nothing: bool
    """The script has none of them."""
    gap: str = ""
    """Why it may have some that were not seen; empty when all were."""


def looked_at(script: Script, subjects: Sequence[Subject], *, triggered: bool) -> LookedAt:
    """Return whether a check of some subjects had anything to look at; ``triggered`` when its words are in the code."""
    if not script.modules:
        return LookedAt(not triggered)
    projection = project(script)
    relevant = [gap for gap in gaps(projection) if (triggered or gap.hides_words) and set(gap.hides) & set(subjects)]
    if relevant:
        return LookedAt(False, "; ".join(list(dict.fromkeys(gap.text for gap in relevant))[:MOST_GAPS]))
    return LookedAt(not triggered or not all(_is_found(projection, subject) for subject in subjects))


def is_recognised(script: Script) -> bool:
    """Return whether anything of a distributed training was recognised in a script."""
    projection = project(script)
    recognised: tuple[Subject, ...] = ("job", "wrap", "data-parallel", "sampler")
    return (
        script.spawns_ranks is not None
        or any(_is_found(projection, subject) for subject in recognised)
        or next(frameworks(projection), None) is not None
    )


@once_each
def _is_found(projection: Projection, subject: Subject) -> bool:
    return _FOUND[subject](projection)


def _any_of(*kinds: str) -> Callable[[Projection], bool]:
    return lambda projection: any(event.kind in kinds and not event.in_parent for event in projection.events)


_ON_A_DEVICE: tuple[Subject, ...] = ("model", "device")
_FOUND: Mapping[Subject, Callable[[Projection], bool]] = {
    "job": is_distributed,
    "device": is_distributed,
    "collectives": _any_of("collective", "wrap"),
    "wrap": _any_of("wrap"),
    "model": _any_of("wrap"),
    "training": lambda projection: is_distributed(projection) and any(projection.in_course("backward")),
    "loss": lambda projection: any(through_ddp(projection, one) for one in projection.in_course("backward")),
    "training-loader": lambda projection: any(feedings(projection)),
    "sampler": _any_of("sampler"),
    "data-parallel": _any_of("data-parallel"),
}


@all_once
def gaps(projection: Projection) -> Iterator[Gap]:
    """Yield what of a script was not understood."""
    yield from _frameworks(projection)
    yield from _engines(projection)
    if not is_distributed(projection):
        return
    yield from _samplers(projection)
    yield from _models(projection)
    yield from _losses(projection)
    yield from _missing_training(projection)
    if any(walk.uncertain for walk in projection.walks):
        yield Gap("a function that only some ranks call was not followed", ("collectives",))


def _frameworks(projection: Projection) -> Iterator[Gap]:
    for event in frameworks(projection):
        if event.name.partition(".")[0] not in _MODELLED and _RUNS.search(event.name):
            text = f"{event.name} runs the training ({_place(event)}), which was not followed"
            yield Gap(text, (*_OF_TRAINING, "collectives"), hides_words=True)
            return


def _engines(projection: Projection) -> Iterator[Gap]:
    """Yield the gap of a training whose backward is run by an object that was not read: it may wrap the model, too."""
    for event in projection.of_kind("backward"):
        if event.name == UNREAD_BACKWARD and not any(projection.of_kind("wrap")):
            called = event.module.excerpt(getattr(event.node, "func", event.node), 40)
            text = f"`{called}` ({_place(event)}) runs the backward, and its object was not read"
            yield Gap(text, (*_OF_TRAINING, "collectives", "job"), hides_words=True)
            return


# In a framework: what trains itself, rather than starting the script's own training.
_RUNS = regex(r"(Trainer|Runner|Engine|Parallel|Fabric|remote)$")
# Frameworks whose effect on ranks, models and loaders is modelled in `torch_model`; apart from those, gaps.
_MODELLED = frozenset({"accelerate", "deepspeed", "lightning", "lightning_fabric", "pytorch_lightning", "transformers"})


def _samplers(projection: Projection) -> Iterator[Gap]:
    machine = projection.machine
    for loader in projection.in_course("loader"):
        for name, position in (("sampler", 3), ("batch_sampler", 4)):
            given = loader.argument(name, position)
            for option in options_of(given) if given is not None else ():
                unread = _unread(option) or (
                    isinstance(option, ExternalObject)
                    and not option.name.startswith("torch.")
                    and machine.object(option) is not None
                )
                if unread and constant(option) is not None:
                    source = _source_of(loader, name, position)
                    text = f"the sampler of the DataLoader at {_place(loader)} is {source}, which was not read"
                    yield Gap(text, ("sampler", "training-loader"), hides_words=True)


def _models(projection: Projection) -> Iterator[Gap]:
    for wrap in projection.in_course("wrap"):
        module = wrap.argument("module", 0)
        if module is not None and all(map(_unread, options_of(module))):
            source = _source_of(wrap, "module", 0)
            text = f"the model that DDP wraps at {_place(wrap)} is {source}, whose class was not read"
            # It may put itself on the GPU where nothing else speaks of one.
            hidden: tuple[Subject, ...] = ("model",) if speaks_of_devices(projection.machine.script) else _ON_A_DEVICE
            yield Gap(text, hidden)


def _losses(projection: Projection) -> Iterator[Gap]:
    wrapped = any(projection.of_kind("wrap"))
    for backward in projection.in_course("backward"):
        if not wrapped or is_averaged(projection, backward):
            continue
        unread = unread_loss(projection, backward)
        if unread is not None:
            origin = f"`{backward.module.excerpt(getattr(unread, 'func', unread), 40)}`"
            text = f"the loss at {_place(backward)} comes from {origin}, which was not followed"
            yield Gap(text, ("loss",))


def _missing_training(projection: Projection) -> Iterator[Gap]:
    """Yield the gap of a job in which nothing trains, though something that was not read is run."""
    if any(projection.of_kind("backward")):
        return
    run = [
        (module, node)
        for node, module in projection.machine.unread.items()
        if isinstance(node, ast.Call) and isinstance(module.parents.get(node), ast.Expr)
    ]
    acts = [(module, node) for module, node in run if not says(node)]
    if acts:
        module, node = acts[-1]
        called = module.excerpt(node.func, 40)
        text = f"no backward was found, and `{called}` at {module.path.name}:{node.lineno} was not followed"
        yield Gap(text, _OF_TRAINING, hides_words=True)


def _unread(value: Value) -> bool:
    """Return whether nothing is known of a value but that it came out of code that was not read."""
    return isinstance(value, Unknown) and value.opaque and not tags_of(value)


def _place(event: Event) -> str:
    return f"{event.module.path.name}:{getattr(event.node, 'lineno', 1)}"


def _source_of(event: Event, name: str, position: int) -> str:
    """Return the source of an argument, or of what its variable was assigned."""
    given = argument_of(event.node, name, position)
    return _called(event.module, event.node, given) if given is not None else "not known"


def _called(module: Module, node: ast.AST, value: ast.expr) -> str:
    """Return what a value comes from: the call that its variable was assigned last, before a node."""
    line = getattr(node, "lineno", 0)
    for _ in range(3):
        name = value.id if isinstance(value, ast.Name) else ""
        before = [
            one.value
            for one in module.index.within(module.body_around(node), ast.Assign)
            if name and one.lineno <= line
            for target in one.targets
            for part in (target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target])
            if last_name(part) == name
        ]
        if not before or before[-1] is value:
            break
        value = before[-1]
        line = value.lineno
    shown = value.func if isinstance(value, ast.Call) else value
    return f"`{module.excerpt(shown, 40)}`"
