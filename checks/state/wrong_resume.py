"""A second start of the job does not go on where its checkpoint was written.

What it finds
    With `ddpdoctor check --resume`: the script is rehearsed until it has written its second checkpoint and further, and
    started again from that checkpoint, in an overlay. What the ranks hold and draw after the restart is compared with
    what the first start went on with: weights, buffers, the optimizer's state, the learning rate and the scaler before
    the first step, the samples of the first pass, the gradient of the first step, the learning rates of the steps after
    it, and the counters, averages and other states in the next checkpoint. The finding names what differs, its effect,
    and the lines that save and load; random numbers are left out unless the checkpoint holds their state. A
    restart that fails on what was saved is an error, too; so is, with `--resume=torn`, one that fails on what a death
    amid a save leaves, or takes it for whole. A script that handles a signal of schedulers is sent it in the middle of
    an epoch, and started again from what it saved then. `--resume-ranks` tells what means something else with another
    number of ranks. A save over the only checkpoint that is there is a warning. In the source: the state of an
    optimizer, a scheduler or a scaler that is saved and that nothing loads, and one that is left out, though weights
    and epoch of the same checkpoint are loaded; a sampler that is told epochs from 0 again, orders that are drawn
    again, and a load with `assign=True` after the optimizer was made.

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
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from ddpdoctor.check import Check, Reason, Restart, RunRecord, Script, TooLittleEvidence, Verdict
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import NONE, ExternalObject, Instance, Value, constant, options_of
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.queries.checkpoint_code import (
    SCHEDULERS,
    STATEFUL,
    constant_text,
    is_named,
    key_of,
    owner_of_state,
    speaks_of,
)
from ddpdoctor.source.queries.job_kind import noted
from ddpdoctor.source.queries.wrapped_models import (
    has_no_tensors,
    holders,
    is_optimizer,
    numbers_of,
    optimizers,
    training_events,
)
from ddpdoctor.source.script.module import Module

if TYPE_CHECKING:
    from ddpdoctor.diagnosis.resume import Comparison, Difference

CHECK = Check(
    code="DDP611",
    name="wrong-resume",
    severity={"source": Severity.WARNING, "rehearsal": Severity.ERROR},
    triggers=("load_state_dict",),
)
_REMEDIES = {
    "weights": "Load weights and buffers under the names that they were saved by, on every rank, with strict=True.",
    "optimizer": "{save}Load the optimizer's state on every rank, after the optimizer is made.",
    "learning-rate": "{save}Load the scheduler's state on every rank, and step it as often as without a restart.",
    "scale": "{save}Load the scaler's state on every rank.",
    "gradient": "Save and load what the loss depends on beside them: a weight that is counted, a memory, a teacher.",
    "random": "Save the state of the generators on each rank, and set it as the last thing before the first batch.",
    "data": "Begin with the epoch after the one that was finished, on every rank, and give it to set_epoch.",
    "place": "Save how many batches of the epoch are done, and leave out so many in the first one after the restart.",
    "again": "Save how far the data were read, or the state of what draws them, and go on from there on every rank.",
    "late": "Save between two steps: let the handler set a flag only, and look at it when the step has been counted.",
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
    first, path = restart.first, "" if compared.save is None else compared.save.path
    torn = torn_restart(restart)
    over = next((one for one in first.resume_saves if one.over_only and one.path == path), None)
    if over is not None and torn is None:
        yield CHECK.finding(
            "a checkpoint is written over the only one: a job that is killed while it saves leaves none that is whole",
            basis="rehearsal",
            remedy=_REMEDIES["torn"],
            locations=site_location(first.site(over.site)),
            because=(f"when it was saved after step {over.step}, no other file of its size was there", None),
            severity=Severity.WARNING,
        )
    if compared.gap:
        raise TooLittleEvidence(compared.gap)
    differences = (*compared.differences, *filter(None, (torn,)))
    yield from _found(differences, compared, first, restart.second, restart.files, restart.how, restart.own_code)
    signalled = signalled_restart(restart)
    if signalled is not None and restart.ended is not None:
        later = restart.resumed or restart.ended
        own = restart.own_code
        yield from _found(
            signalled.differences, signalled, restart.ended, later, restart.left, restart.how_resumed, own
        )


def _found(
    differences: Iterable[Difference],
    compared: Comparison,
    first: RunRecord,
    second: RunRecord,
    files: Iterable[str],
    how: str,
    own: Mapping[str, tuple[str, str]],
) -> Iterator[Finding]:
    """Yield what is otherwise in a second start, with the lines that save in the first one and load in the second."""
    from ddpdoctor.diagnosis.resume import loads_of, places_of

    save, loads = compared.save, loads_of(second, files)
    save_place, load_place = places_of(save, first, loads, second)
    for found in differences:
        state = _STATES.get(found.what)
        to_save, to_load = own.get(found.what, ("", ""))
        where = f": `{to_save}`" if to_save else ""
        missing = "" if found.saved or state is None else f"Save the state of {state} in the checkpoint{where}. "
        loaded_first = found.saved and found.what not in ("torn", "place", "again", "late", "signal")
        places = (load_place, save_place) if loaded_first else (save_place, load_place)
        told: list[Reason] = [(text, None) for text in (how, *found.facts)]
        if missing:
            told.append((f"the state of {state} is not saved: no key of the checkpoint holds it", None))
        if save is not None:
            told.append(("the checkpoint is saved here", save_place))
        if loads:
            told.append(("it is loaded here", load_place))
        yield CHECK.finding(
            found.title,
            basis="rehearsal",
            remedy=_in_own_code(_REMEDIES[found.what].format(save=missing), to_load),
            ranks=found.ranks if len(found.ranks) < len(first.ranks) else (),
            locations=tuple(place for place in (found.place, *places) if place is not None),
            because=told,
            severity=Severity.WARNING if found.what in ("ranks", "late", "gradient", "random") else None,
        )


def _in_own_code(remedy: str, code: str) -> str:
    return f"{remedy.removesuffix('.')}: `{code}`." if code else remedy


def in_source(script: Script) -> Iterator[Finding]:
    """Report what a restart does not bring back of a checkpoint, and weights that the optimizer does not step then."""
    from ddpdoctor.checks.state.begun_again_source import begun_again

    yield from CHECK.suspected((*left_out(script), *begun_again(script), *replaced(script)))


# State of a job that its checkpoints leave out, or the code that resumes, as the source shows it.

_UNSAVED = {
    "optimizer": ("optimizer", "weights", "its moments begin at zero"),
    "scheduler": ("scheduler", "optimizer", "its schedule begins again"),
    "scaler": ("gradient scaler", "optimizer", "its scale begins again, and steps are skipped until it fits"),
}
_COUNTS = ("epoch", "step", "iter")


def left_out(script: Script) -> Iterator[Verdict]:
    """Yield states of a job whose weights and epoch are loaded again, and they are not: left out by the code that
    loads, or by the checkpoint.

    What is loaded is known by the objects that load_state_dict is called of. Where one of those is not known, any other
    use of the key as a string is taken for its load. A job goes on from where weights and epoch are taken of one thing.
    """
    read: set[str] = set()
    loads: list[ast.Call] = []
    saved: list[tuple[Module, ast.Dict, dict[str, ast.expr]]] = []
    for module in script.modules:
        keys: set[int] = set()
        for literal in module.index.of(ast.Dict):
            pairs = zip(literal.keys, literal.values, strict=True)
            named = {text: value for key, value in pairs if (text := constant_text(key))}
            keys.update(id(key) for key in literal.keys)
            if any(owner_of_state(value) for value in named.values()) and any(
                speaks_of(name, _COUNTS) for name in named
            ):
                saved.append((module, literal, named))
        read |= {
            one.value for one in module.index.of(ast.Constant) if id(one) not in keys and isinstance(one.value, str)
        }
        loads += module.calls_by_name.get("load_state_dict", ())
    given = [argument for call in loads for argument in call.args[:1]]
    if not saved or any(isinstance(one, ast.Subscript) and not isinstance(one.slice, ast.Constant) for one in given):
        return
    states, taken = _States(script), _taken(script)
    if states.are_loaded_at_the_end:
        return
    for module, literal, named in saved:
        weights = [name for name, value in named.items() if owner_of_state(value) and not _is_stateful(name, value)]
        states_of = {name: value for name, value in named.items() if owner_of_state(value)}
        counts = {name for name in named if speaks_of(name, _COUNTS)}
        if not any(keys & set(states_of) and keys & counts for keys in taken):
            continue  # Nothing goes on from it: it is loaded for an evaluation, or elsewhere.
        with_weights = bool(read.intersection(weights))
        for name, value in states_of.items() if with_weights else ():
            if not _is_stateful(name, value):
                continue
            if states.is_told(name, value) or states.is_empty(value):
                continue
            if name not in read or states.is_left_out(value):
                place = module.location(value)
                known = "no other line of the project names this key"
                yield Verdict(
                    sentence=f"`{name}` is saved in the checkpoint and never loaded, though its weights and its epoch "
                    "are",
                    remedy=f'Load it on every rank where the weights are: load_state_dict(checkpoint["{name}"]).',
                    locations=place,
                    because=(known if name not in read else "nothing calls load_state_dict of its object", place),
                )
        for kind, (what, beside, effect) in _UNSAVED.items():
            made = states.without_optimizer() if kind == "optimizer" else states.unsaved(kind) if with_weights else None
            if made is not None and not speaks_of(ast.dump(literal), (kind[:5],)):
                yield Verdict(
                    sentence=f"the {what}'s state is in no checkpoint, though {beside} and epoch are loaded: {effect}",
                    remedy=f'Add "{kind}": {kind}.state_dict() to the checkpoint, and load it on every rank.',
                    locations=module.location(literal),
                    because=(f"the {what} is made here", made.location),
                    severity=Severity.ADVICE if kind == "scaler" else None,  # A few steps are lost.
                )


def _taken(script: Script) -> Collection[set[str]]:
    """Return the keys that are taken of each thing, known by its text: a configuration has an epoch, too."""
    taken: dict[str, set[str]] = {}
    for module in script.modules:
        for part in (*module.index.of(ast.Subscript), *module.index.of(ast.Call)):
            whose = part.func if isinstance(part, ast.Call) else part
            if isinstance(whose, (ast.Attribute, ast.Subscript)) and (key := key_of(part)):
                taken.setdefault(ast.unparse(whose.value), set()).add(key)
    return taken.values()


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
        self._last_step = max((step.ordinal for step in self._steps), default=0)
        self._read_everywhere = written <= come_to

    @property
    def are_loaded_at_the_end(self) -> bool:
        """Whether no step follows any load: the best weights are taken back to be evaluated."""
        trains = {loop.node for step in self._steps for loop in step.loops}
        return bool(self._steps and self._loads and self._read_everywhere) and all(
            load.ordinal > self._last_step and trains.isdisjoint(loop.node for loop in load.loops)
            for load in self._loads
        )

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
        return speaks_of(f"{key} {whose}", ("sched",)) and any(
            call.args and (_owner(call) == whose or speaks_of(_owner(call), ("sched",)))
            for module in self._script.modules
            for name in ("step", "step_update")
            for call in module.calls_by_name.get(name, ())
        )

    def without_optimizer(self) -> Event | None:
        """Return where the only optimizer is made, if weights are loaded and what it keeps is saved in no way."""
        made = list(optimizers(whole_projection(self._script)))
        if len(made) != 1 or _keeps_nothing(made[0]) or not self._all_known:
            return None
        loaded = {kind for one in self._loads for kind in self._kinds(one)}
        if "module" not in loaded or any("optimizer" in self._kinds(one) for one in (*self._saves, *self._loads)):
            return None
        modules = self._script.modules
        own = {one.name for module in modules for one in module.index.of(ast.FunctionDef)}
        handed = (
            call
            for module in modules
            for name, calls in module.calls_by_name.items()
            if name not in own and speaks_of(name, ("save", "state"))
            for call in calls
        )
        return None if any(speaks_of(ast.dump(call), ("optim",)) for call in handed) else made[0]

    def unsaved(self, kind: str) -> Event | None:
        """Return where the only scheduler or scaler is made, if its state is neither saved nor made up for."""
        made = [one for one in self._made.values() if is_named(one.name, kind)]
        if len(made) != 1 or not self._all_known or made[0].argument("last_epoch") is not None:
            return None
        enabled = made[0].argument("enabled")
        if enabled is not None and constant(enabled) is not True:
            return None
        if any(kind in self._kinds(one) for one in (*self._saves, *self._loads)):
            return None
        if not any("optimizer" in self._kinds(one) for one in self._loads):
            return None
        stepped = {one.node: one for one in self._steps if kind in self._kinds(one)}
        once = len(stepped) == 1 and all(
            one.loops and (kind == "scaler" or not one.positional) for one in stepped.values()
        )
        moved = kind == "scheduler" and any(
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
        return any(map(_keeps_nothing, made))


def _keeps_nothing(made: Event) -> bool:
    """Return whether an optimizer has no state that outlives a turn of the loop around it."""
    return bool(made.loops) or (made.name == "torch.optim.SGD" and made.argument("momentum", 2) is None)


_KINDS = {"optimizer", "scheduler", "scaler"}


def _kind_of(value: Value) -> str:
    if is_optimizer(value):
        return "optimizer"
    if not has_no_tensors(value):
        return "module"
    return "scheduler" if isinstance(value, ExternalObject) and value.name.startswith(SCHEDULERS) else "scaler"


def _is_stateful(key: str, value: ast.expr) -> bool:
    """Return whether a state is an optimizer's, a scheduler's or a scaler's, by its key or by what it is taken of."""
    return speaks_of(f"{key} {ast.dump(value)}", STATEFUL)


def _owner(call: ast.expr) -> str:
    """Return whose method is called, as code; empty for what is no such call."""
    return ast.dump(call.func.value) if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""


# Parameters that a load replaces while an optimizer holds them.


def replaced(script: Script) -> Iterator[Verdict]:
    """Yield loads with ``assign=True`` into a model after its only optimizer was made of it."""
    projection = whole_projection(script)
    held = [(one, holders(projection, one)) for one in optimizers(projection)]
    if any(training_events(projection, "add_param_group")):
        return
    for load in noted(projection, "load_state_dict"):
        owners = [one for one, models in held if load.receiver in models]
        if constant(load.argument("assign", 2) or NONE) is not True or not owners:
            continue
        if max(one.ordinal for one in owners) < load.ordinal:
            yield Verdict(
                sentence="assign=True replaces the parameters that the optimizer holds: it steps those that nothing "
                "uses now",
                remedy="Load without assign=True, or make the optimizer after the load.",
                locations=load.location,
                because=("the optimizer is made of them here", owners[-1].location),
            )
