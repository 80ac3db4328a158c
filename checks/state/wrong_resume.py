"""A second start of the job does not go on where its checkpoint was written.

What it finds
    With `ddpdoctor check --resume`: the script is rehearsed until it has written its second checkpoint and further, and
    started again from that checkpoint, in an overlay. What the ranks hold and draw after the restart is compared with
    what the first start went on with: weights, the optimizer's state, the learning rate and the scaler before the first
    step, the samples of the first pass, the learning rates of the steps after it, and the counters, averages and other
    states in the next checkpoint. The finding names what differs, its effect, and the lines that save and load. A save
    over the only checkpoint that is there is a warning. In the source: the state of an optimizer, a scheduler or a
    scaler that is saved under a key which nothing loads, though weights and epoch of the same checkpoint are loaded.

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
import os.path
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check, TooLittleEvidence
from ddpdoctor.finding import Fact, Finding, Severity

if TYPE_CHECKING:
    from ddpdoctor.record.model import Restart
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
    "counter": "Save this count as it is after the step, load it, and go on from it.",
    "kept": "Load this state, too, on every rank that uses it.",
}
_STATES = {"optimizer": "the optimizer", "learning-rate": "the scheduler", "scale": "the scaler"}


def in_restart(restart: Restart) -> Iterator[Finding]:
    """Report what the second start of a job does otherwise than the first one had gone on."""
    from ddpdoctor.diagnosis.resume import compare
    from ddpdoctor.diagnosis.wording import site_location

    compared = compare(restart)
    if compared.gap:
        raise TooLittleEvidence(compared.gap)
    save, second = compared.save, restart.second
    files = {os.path.realpath(path) for path in restart.files}
    loads = sorted(
        (one for one in second.checkpoint_loads if os.path.realpath(one.path) in files), key=lambda one: one.rank
    )
    load_place = next((place for one in loads if (place := site_location(second.site(one.site)))), None)
    save_place = None if save is None else site_location(restart.first.site(save.site))
    path = "" if save is None else save.path
    over = next((one for one in restart.first.resume_saves if one.over_only and one.path == path), None)
    if over is not None:
        yield CHECK.finding(
            "rehearsal",
            "a checkpoint is written over the only one: a job that is killed while it saves leaves none that is whole",
            remedy="Save to another name in the same folder, and then os.replace it to this one.",
            locations=site_location(restart.first.site(over.site)),
            evidence=_told((f"when it was saved after step {over.step}, no other file of its size was there",)),
            severity=Severity.WARNING,
        )
    for found in compared.differences:
        state = _STATES.get(found.what)
        missing = "" if found.saved or state is None else f"Save the state of {state} in the checkpoint. "
        places = (load_place, save_place) if found.saved else (save_place, load_place)
        told = [Fact(text=restart.how, basis="rehearsal"), *_told(found.facts)]
        if missing:
            told += _told((f"the state of {state} is not saved: no key of the checkpoint holds it",))
        told.append(Fact(text="the checkpoint is saved here", basis="rehearsal", location=save_place))
        told.append(Fact(text="it is loaded here", basis="rehearsal", location=load_place))
        yield CHECK.finding(
            "rehearsal",
            found.title,
            remedy=_REMEDIES[found.what].format(save=missing),
            ranks=found.ranks if len(found.ranks) < len(restart.first.ranks) else (),
            locations=tuple(place for place in places if place is not None),
            evidence=tuple(told),
        )


def _told(texts: Iterable[str]) -> list[Fact]:
    return [Fact(text=text, basis="rehearsal") for text in texts]


# What the source alone shows: a state that is saved, and left out by the code that loads the rest.

_STATEFUL = ("optim", "sched", "scaler")
_COUNTS = ("epoch", "step", "iter")


def in_source(script: Script) -> Iterator[Finding]:
    """Report states in a checkpoint whose weights and epoch are loaded again, and they are not.

    Any other use of the key as a string is taken for its load, and so is a load by a key that is not written out.
    """
    read: set[str] = set()
    loads: list[ast.Call] = []
    steps: list[ast.Call] = []
    saved: list[tuple[Module, dict[str, ast.expr]]] = []
    for module in script.modules:
        keys: set[int] = set()
        for literal in module.index.of(ast.Dict):
            pairs = zip(literal.keys, literal.values, strict=True)
            named = {text: value for key, value in pairs if (text := _text(key))}
            keys.update(id(key) for key in literal.keys)
            if any(_is_state(value) for value in named.values()) and any(_speaks_of(name, _COUNTS) for name in named):
                saved.append((module, named))
        read |= {
            one.value for one in module.index.of(ast.Constant) if id(one) not in keys and isinstance(one.value, str)
        }
        loads += module.calls_by_name.get("load_state_dict", ())
        steps += (*module.calls_by_name.get("step", ()), *module.calls_by_name.get("step_update", ()))
    given = [argument for call in loads for argument in call.args[:1]]
    if any(isinstance(one, ast.Subscript) and not isinstance(one.slice, ast.Constant) for one in given):
        return
    # A scheduler that is told the epoch in each step has no state of its own.
    told = any(call.args and "sched" in ast.dump(call.func).lower() for call in steps)
    for module, named in saved:
        weights = [
            name for name, value in named.items() if _is_state(value) and not _speaks_of(ast.dump(value), _STATEFUL)
        ]
        if not read.intersection(weights) or not any(_speaks_of(name, _COUNTS) and name in read for name in named):
            continue  # Nothing goes on from it: it is loaded for an evaluation, or elsewhere.
        for name, value in named.items():
            if told and "sched" in ast.dump(value).lower():
                continue
            if _is_state(value) and _speaks_of(ast.dump(value), _STATEFUL) and name not in read:
                place = module.location(value)
                yield CHECK.finding(
                    "source",
                    f"`{name}` is saved in the checkpoint and never loaded, though its weights and its epoch are",
                    remedy=f'Load it on every rank where the weights are: load_state_dict(checkpoint["{name}"]).',
                    locations=(place,),
                    because=(("no other line of the project names this key", place),),
                )


def _speaks_of(text: str, words: Iterable[str]) -> bool:
    return any(word in text.lower() for word in words)


def _text(node: ast.expr | None) -> str:
    """Return what a node is that is a string; empty for others."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _is_state(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "state_dict"
