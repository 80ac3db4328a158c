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
    optimizer, a scheduler or a scaler that is saved and that nothing loads, and a scheduler or scaler that is left out,
    though weights and epoch of the same checkpoint are loaded; a sampler that is told epochs from 0 again, orders that
    are drawn again, and a load with `assign=True` after the optimizer was made.

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

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from ddpdoctor.check import Check, Restart, RunRecord, Script, TooLittleEvidence
from ddpdoctor.checks.state.wrong_resume_source import begun_again, left_out, replaced
from ddpdoctor.finding import Fact, Finding, Severity

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
            evidence=_told((f"when it was saved after step {over.step}, no other file of its size was there",)),
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
        told = [Fact(text=how, basis="rehearsal"), *_told(found.facts)]
        if missing:
            told += _told((f"the state of {state} is not saved: no key of the checkpoint holds it",))
        if save is not None:
            told.append(Fact(text="the checkpoint is saved here", basis="rehearsal", location=save_place))
        if loads:
            told.append(Fact(text="it is loaded here", basis="rehearsal", location=load_place))
        yield CHECK.finding(
            found.title,
            basis="rehearsal",
            remedy=_in_own_code(_REMEDIES[found.what].format(save=missing), to_load),
            ranks=found.ranks if len(found.ranks) < len(first.ranks) else (),
            locations=tuple(place for place in (found.place, *places) if place is not None),
            evidence=tuple(told),
            severity=Severity.WARNING if found.what in ("ranks", "late", "gradient", "random") else None,
        )


def _in_own_code(remedy: str, code: str) -> str:
    return f"{remedy.removesuffix('.')}: `{code}`." if code else remedy


def _told(texts: Iterable[str]) -> list[Fact]:
    return [Fact(text=text, basis="rehearsal") for text in texts]


def in_source(script: Script) -> Iterator[Finding]:
    """Report what a restart does not bring back of a checkpoint, and weights that the optimizer does not step then."""
    yield from CHECK.suspected((*left_out(script), *begun_again(script), *replaced(script)))
