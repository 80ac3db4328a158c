"""A second start of the job does not go on where its checkpoint was written.

What it finds
    With `ddpdoctor check --resume`: the script is rehearsed until it has written its second checkpoint and further, and
    started again from that checkpoint, in an overlay. What the ranks hold and draw after the restart is compared with
    what the first start went on with: weights, the optimizer's state, the learning rate and the scaler before the first
    step, the samples of the first pass, the learning rates of the steps after it, and the counters, averages and other
    states in the next checkpoint. The finding names what differs, its effect, and the lines that save and load. A
    restart that fails on what was saved is an error, too; so is, with `--resume=torn`, one that fails on what a death
    amid a save leaves, or takes it for whole. A script that handles a signal of schedulers is sent it in the middle of
    an epoch, and started again from what it saved then. `--resume-ranks` tells what means something else with another
    number of ranks. A save over the only checkpoint that is there is a warning. In the source: the state of an
    optimizer, a scheduler or a scaler that is saved and that nothing loads, and a scheduler that is left out, though
    weights and epoch of the same checkpoint are loaded.

Why it is bad
    The loss jumps a little and recovers, and nobody looks. Samples are seen twice or never, the schedule runs from its
    beginning, and the job that was restarted five times is another experiment than the one that was not.

Example
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.load_state_dict(checkpoint["model"])      # the optimizer's state is in the file, and nothing loads it

Remedy
    Save and load, on every rank, all that the next step depends on: weights, optimizer, scheduler, scaler, the number
    of the epoch for `set_epoch` (the one after the finished one), and counters that decide something.

When it is wrong
    Where a restart is meant to begin something anew, such as a fine-tuning with a schedule of its own; and where a copy
    of the checkpoint is kept outside the working directory.

References
    https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check, TooLittleEvidence
from ddpdoctor.finding import Fact, Finding, Severity
from ddpdoctor.source.interpreter.values import ExternalObject, Instance, Value, options_of
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.queries.job_kind import noted
from ddpdoctor.source.queries.wrapped_models import has_no_tensors, is_optimizer, numbers_of, training_events

if TYPE_CHECKING:
    from ddpdoctor.diagnosis.resume import Comparison, Difference
    from ddpdoctor.record.model import Restart, RunRecord
    from ddpdoctor.source.events import Event
    from ddpdoctor.source.script.module import Module
    from ddpdoctor.source.script.script import Script

CHECK = Check(
    code="DDP611",
    name="wrong-resume",
    severity={"source": Severity.WARNING, "rehearsal": Severity.ERROR},
    triggers=("load_state_dict",),
)
_REMEDIES = {
    "weights": "Load the weights under the names that they were saved by, on every rank, with strict=True.",
    "optimizer": "{save}Load the optimizer's state on every rank, after the optimizer is made.",
    "learning-rate": "{save}Load the scheduler's state on every rank, and step it as often as without a restart.",
    "scale": "{save}Load the scaler's state on every rank.",
    "data": "Begin with the epoch after the one that was finished, on every rank, and give it to set_epoch.",
    "place": "Save how many batches of the epoch are done, and leave out so many in the first one after the restart.",
    "signal": "Save on the way out what the code that resumes looks for, and let all ranks leave together.",
    "counter": "Save this count as it is after the step, load it, and go on from it.",
    "kept": "Load this state, too, on every rank that uses it.",
    "fails": "Let the code that resumes load, on every rank, what was saved, as it was saved.",
    "ranks": "Make the batch of a rank, the schedule and the place in the epoch from the number of ranks, in samples.",
    "refused": "Save plain values, such as vars(args) and float(lr), or load with weights_only=False.",
    "torn": "Save to another name in the same folder, and then os.replace it to this one.",
}
_STATES = {"optimizer": "the optimizer", "learning-rate": "the scheduler", "scale": "the scaler"}


def in_restart(restart: Restart) -> Iterator[Finding]:
    """Report what the second start of a job does otherwise than the first one had gone on."""
    from ddpdoctor.diagnosis.resume import compare, signalled_restart, torn_restart
    from ddpdoctor.diagnosis.wording import site_location

    compared = compare(restart)
    if compared.gap:
        raise TooLittleEvidence(compared.gap)
    first, path = restart.first, "" if compared.save is None else compared.save.path
    torn = torn_restart(restart)
    over = next((one for one in first.resume_saves if one.over_only and one.path == path), None)
    if over is not None and torn is None:
        yield CHECK.finding(
            "rehearsal",
            "a checkpoint is written over the only one: a job that is killed while it saves leaves none that is whole",
            remedy=_REMEDIES["torn"],
            locations=site_location(first.site(over.site)),
            evidence=_told((f"when it was saved after step {over.step}, no other file of its size was there",)),
            severity=Severity.WARNING,
        )
    differences = (*compared.differences, *filter(None, (torn,)))
    yield from _found(differences, compared, first, restart.second, restart.files, restart.how)
    signalled = signalled_restart(restart)
    if signalled is not None and restart.ended is not None:
        later = restart.resumed or restart.ended
        yield from _found(signalled.differences, signalled, restart.ended, later, restart.left, restart.how_resumed)


def _found(
    differences: Iterable[Difference],
    compared: Comparison,
    first: RunRecord,
    second: RunRecord,
    files: Iterable[str],
    how: str,
) -> Iterator[Finding]:
    """Yield what is otherwise in a second start, with the lines that save in the first one and load in the second."""
    from ddpdoctor.diagnosis.resume import loads_of
    from ddpdoctor.diagnosis.wording import site_location

    save = compared.save
    loads = sorted(loads_of(second, files), key=lambda one: one.rank)
    load_place = next((place for one in loads if (place := site_location(second.site(one.site)))), None)
    save_place = None if save is None else site_location(first.site(save.site))
    for found in differences:
        state = _STATES.get(found.what)
        missing = "" if found.saved or state is None else f"Save the state of {state} in the checkpoint. "
        loaded_first = found.saved and found.what not in ("torn", "place", "signal")
        places = (load_place, save_place) if loaded_first else (save_place, load_place)
        told = [Fact(text=how, basis="rehearsal"), *_told(found.facts)]
        if missing:
            told += _told((f"the state of {state} is not saved: no key of the checkpoint holds it",))
        if save is not None:
            told.append(Fact(text="the checkpoint is saved here", basis="rehearsal", location=save_place))
        if loads:
            told.append(Fact(text="it is loaded here", basis="rehearsal", location=load_place))
        yield CHECK.finding(
            "rehearsal",
            found.title,
            remedy=_REMEDIES[found.what].format(save=missing),
            ranks=found.ranks if len(found.ranks) < len(first.ranks) else (),
            locations=tuple(place for place in (found.place, *places) if place is not None),
            evidence=tuple(told),
            severity=Severity.WARNING if found.what == "ranks" else None,
        )


def _told(texts: Iterable[str]) -> list[Fact]:
    return [Fact(text=text, basis="rehearsal") for text in texts]


# What the source alone shows: a state that is saved, and left out by the code that loads the rest.

_STATEFUL = ("optim", "sched", "scaler")
_COUNTS = ("epoch", "step", "iter")


def in_source(script: Script) -> Iterator[Finding]:
    """Report states of a job whose weights and epoch are loaded again, and they are not: left out by the code that
    loads, or by the checkpoint.

    What is loaded is known by the objects that load_state_dict is called of. Where one of those is not known, any other
    use of the key as a string is taken for its load.
    """
    read: set[str] = set()
    loads: list[ast.Call] = []
    saved: list[tuple[Module, ast.Dict, dict[str, ast.expr]]] = []
    for module in script.modules:
        keys: set[int] = set()
        for literal in module.index.of(ast.Dict):
            pairs = zip(literal.keys, literal.values, strict=True)
            named = {text: value for key, value in pairs if (text := _text(key))}
            keys.update(id(key) for key in literal.keys)
            if any(_is_state(value) for value in named.values()) and any(_speaks_of(name, _COUNTS) for name in named):
                saved.append((module, literal, named))
        read |= {
            one.value for one in module.index.of(ast.Constant) if id(one) not in keys and isinstance(one.value, str)
        }
        loads += module.calls_by_name.get("load_state_dict", ())
    given = [argument for call in loads for argument in call.args[:1]]
    if not saved or any(isinstance(one, ast.Subscript) and not isinstance(one.slice, ast.Constant) for one in given):
        return
    states = _States(script)
    for module, literal, named in saved:
        weights = [name for name, value in named.items() if _is_state(value) and not _is_stateful(name, value)]
        if not read.intersection(weights) or not any(_speaks_of(name, _COUNTS) and name in read for name in named):
            continue  # Nothing goes on from it: it is loaded for an evaluation, or elsewhere.
        for name, value in named.items():
            if not _is_state(value) or not _is_stateful(name, value):
                continue
            if states.is_told(name, value) or states.is_empty(value):
                continue
            if name not in read or states.is_left_out(value):
                place = module.location(value)
                known = "no other line of the project names this key"
                yield CHECK.finding(
                    "source",
                    f"`{name}` is saved in the checkpoint and never loaded, though its weights and its epoch are",
                    remedy=f'Load it on every rank where the weights are: load_state_dict(checkpoint["{name}"]).',
                    locations=(place,),
                    because=((known if name not in read else "nothing calls load_state_dict of its object", place),),
                )
        if (scheduler := states.unsaved_scheduler()) is not None and not _speaks_of(ast.dump(literal), ("sched",)):
            yield CHECK.finding(
                "source",
                "the scheduler's state is not in the checkpoint, whose optimizer and epoch are loaded: its schedule "
                "begins again",
                remedy='Add "scheduler": scheduler.state_dict() to the checkpoint, and load it on every rank.',
                locations=(module.location(literal),),
                because=(("the scheduler is made here", scheduler.location),),
            )


class _States:
    """What is saved and loaded of the optimizers, schedulers and scalers that the script comes to."""

    def __init__(self, script: Script) -> None:
        self._script = script
        projection = whole_projection(script)
        self._saves = list(noted(projection, "state_dict"))
        self._loads = list(noted(projection, "load_state_dict"))
        self._made = {event.ordinal: event for event in projection.in_course("object")}
        self._steps = list(training_events(projection, "step"))
        written = {call for module in script.modules for call in module.calls_by_name.get("load_state_dict", ())}
        come_to = {event.node for event in self._loads}
        self._all_known = bool(written) and written <= come_to and all(map(self._kinds, self._loads))

    def is_left_out(self, save: ast.expr) -> bool:
        """Return whether a state is saved of an object, and no object of its kind loads any."""
        saves = [one for one in self._saves if one.node is save]
        kinds = {kind for one in saves for kind in self._kinds(one)}
        if not kinds or not kinds <= _KINDS or not self._all_known:
            return False
        return not any(kinds & self._kinds(one) for one in self._loads)

    def is_told(self, key: str, save: ast.expr) -> bool:
        """Return whether a scheduler is told the epoch in each step, and has no state of its own."""
        whose = _owner(save)
        return _speaks_of(f"{key} {whose}", ("sched",)) and any(
            call.args and (_owner(call) == whose or _speaks_of(_owner(call), ("sched",)))
            for module in self._script.modules
            for name in ("step", "step_update")
            for call in module.calls_by_name.get(name, ())
        )

    def unsaved_scheduler(self) -> Event | None:
        """Return where the only scheduler is made, if its state is neither saved nor made up for."""
        made = [one for one in self._made.values() if one.name.startswith(_SCHEDULERS)]
        if len(made) != 1 or not self._all_known or made[0].argument("last_epoch") is not None:
            return None
        if any("scheduler" in self._kinds(one) for one in (*self._saves, *self._loads)):
            return None
        if not any("optimizer" in self._kinds(one) for one in self._loads):
            return None
        stepped = {one.node: one for one in self._steps if "scheduler" in self._kinds(one)}
        once = len(stepped) == 1 and all(one.loops and not one.positional for one in stepped.values())
        moved = any(
            node.attr == "last_epoch" and isinstance(node.ctx, ast.Store)
            for module in self._script.modules
            for node in module.index.of(ast.Attribute)
        )
        return made[0] if once and not moved else None

    def _kinds(self, event: Event) -> set[str]:
        """Return what an object is of which a method is called; nothing where that is not known."""
        options = tuple(options_of(event.receiver)) if event.receiver is not None else ()
        if not options or not all(isinstance(one, (ExternalObject, Instance)) for one in options):
            return set()
        return {_kind_of(one) for one in options}

    def is_empty(self, save: ast.expr) -> bool:
        """Return whether it is of an optimizer that keeps nothing: SGD without momentum, one that is made in a loop."""
        numbers = {number for one in self._saves if one.node is save for number in numbers_of(one.receiver)}
        made = [self._made[number] for number in numbers if number in self._made]
        return any(one.loops or (one.name == "torch.optim.SGD" and one.argument("momentum", 2) is None) for one in made)


_SCHEDULERS = "torch.optim.lr_scheduler."
_KINDS = {"optimizer", "scheduler", "scaler"}


def _kind_of(value: Value) -> str:
    if is_optimizer(value):
        return "optimizer"
    if not has_no_tensors(value):
        return "module"
    return "scheduler" if isinstance(value, ExternalObject) and value.name.startswith(_SCHEDULERS) else "scaler"


def _speaks_of(text: str, words: Iterable[str]) -> bool:
    return any(word in text.lower() for word in words)


def _is_stateful(key: str, value: ast.expr) -> bool:
    """Return whether a state is an optimizer's, a scheduler's or a scaler's, by its key or by what it is taken of."""
    return _speaks_of(f"{key} {ast.dump(value)}", _STATEFUL)


def _owner(call: ast.expr) -> str:
    """Return whose method is called, as code; empty for what is no such call."""
    return ast.dump(call.func.value) if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""


def _text(node: ast.expr | None) -> str:
    """Return what a node is that is a string; empty for others."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _is_state(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "state_dict"
