"""A second start of the job does not go on where its checkpoint was written.

What it finds
    With `ddpdoctor check --resume`: the script is rehearsed until it has written its second checkpoint and further, and
    started again from that checkpoint, in an overlay. What the ranks hold and draw after the restart is compared with
    what the first start went on with: weights, the optimizer's state, the learning rate and the scaler before the first
    step, the samples of the first pass, the learning rates of the steps after it, and the counters, averages and other
    states in the next checkpoint. The finding names what differs, its effect, and the lines that save and load.

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
    Where a restart is meant to begin something anew, such as a fine-tuning with a schedule of its own.

References
    https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Severity

if TYPE_CHECKING:
    from ddpdoctor.diagnosis.resume import Comparison
    from ddpdoctor.record.model import RunRecord
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


def in_source(script: Script) -> Iterator[Finding]:
    """Report nothing yet."""
    yield from ()


def findings_of(compared: Comparison, first: RunRecord, second: RunRecord) -> Iterator[Finding]:
    """Report what two starts of a job, compared, differ in."""
    from ddpdoctor.diagnosis.wording import site_location

    save = compared.save
    loads = [one for one in second.checkpoint_loads if one.rank == 0] or list(second.checkpoint_loads)
    load_place = next((place for one in loads if (place := site_location(second.site(one.site)))), None)
    save_place = None if save is None else site_location(first.site(save.site))
    for found in compared.differences:
        state = _STATES.get(found.what)
        missing = "" if found.saved or state is None else f"Save the state of {state[4:]} in the checkpoint. "
        places = (load_place, save_place) if found.saved else (save_place, load_place)
        told = [Fact(text=text, basis="rehearsal") for text in found.facts]
        if missing:
            told.append(Fact(text=f"the state of {state} is not saved: no key of the checkpoint holds it", basis="rehearsal"))
        told.append(Fact(text="the checkpoint is saved here", basis="rehearsal", location=save_place))
        told.append(Fact(text="and loaded here", basis="rehearsal", location=load_place))
        yield CHECK.finding(
            "rehearsal",
            found.title,
            remedy=_REMEDIES[found.what].format(save=missing),
            ranks=found.ranks if len(found.ranks) < len(first.ranks) else (),
            locations=tuple(place for place in places if place is not None),
            evidence=tuple(told),
        )
