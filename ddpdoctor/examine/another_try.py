"""Rehearses once more where the first rehearsal failed by what it did otherwise than the job, not by the script.

Whether it was that is not guessed: the second rehearsal does without it, and what it shows takes the place of the
first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING

import msgspec

from ddpdoctor.diagnosis.failures import gpus_for_the_ranks, is_written_by_ranks, lack_behind
from ddpdoctor.diagnosis.files import races
from ddpdoctor.examination import RehearsalSection
from ddpdoctor.files import regex
from ddpdoctor.finding import Trouble
from ddpdoctor.launch.request import RehearsalRequest
from ddpdoctor.probe.user_code import UserCode
from ddpdoctor.record.joining import headline

if TYPE_CHECKING:
    from ddpdoctor.record.model import RankException, RunRecord

TRIES = 5
"""Rehearsals of one script at most: each leaves out one more thing that the job does otherwise."""

LONGER_PASSES = 16
"""Batches of a pass where four were too few for the script: most accumulate over no more, and it takes seconds."""

MOST_GPUS = 8
"""Of one node, as most have them; an index beyond is a mistake of the script. As many ranks run here at most."""

USAGE = 2
"""The exit code of a script that does not know its arguments."""

_SPEAKS_OF_GPUS = regex(r"cuda|\bn?gpus?\b|nvidia|nccl|accelerator device", re.IGNORECASE)
_SPEAKS_OF_RANKS = regex(r"\branks?\b|world[ _]?size|\bmesh|divi(sible|des)\b|nproc|\bprocesses\b", re.IGNORECASE)
_LAST_LINES = 4
"""Of a traceback: the line that raised, as the source has it, and the message."""
_SPEAKS_OF_SIZES = regex(
    r"shape|siz(e|ing)|dimension|reshape|elements|chunk|split|divisible|batch|must match|more than 1 value|empty|"
    r"out of (range|bounds)",
    re.IGNORECASE,
)
_NO_FILE = regex(r"No such file or directory: '([^']+)'")
_OF_SLURM = regex(r"'SLURM_\w+'")
"""The message of a KeyError for a variable that is not there."""
_APEX = "apex"
_LACKS_APEX = regex(r"\b(apex|amp)\b.*\binstall|\binstall.*\b(apex|amp)\b", re.IGNORECASE | re.DOTALL)
"""The sentence of a script that has caught the ImportError."""
_OF_TORCH_LOAD = "torch/serialization.py"
_WEIGHTS_FILE = regex(r"[\w./\\:~-]+\.(?:pth(?:\.tar)?|pt|ckpt|safetensors)(?![\w.])")
"""In the message of a script that has looked for its checkpoint before it loads it."""
_OF_NO_WEIGHTS = "NoWeights"
"""The class that stands for an absent checkpoint, as the message of an exception names it."""
_OF_LABELS = regex(
    r"Target -?\d+ is out of bounds|Class values must be smaller than num_classes|index \d+ is out of bounds for dim"
    r"|values in `(target|preds)`"
)
"""What torch says of a label that is no class: in cross entropy, in one_hot, as an index; and torchmetrics."""
_OF_ANY_SIZE = regex(r"view size is not compatible.*", re.DOTALL)
"""What torch says of a tensor that is not contiguous, however large it is."""
_OF_FEWER_SAMPLES = frozenset({"IndexError", "ZeroDivisionError", "AssertionError", "StopIteration"})
"""What code raises that splits a batch, whatever the message."""


class Try(msgspec.Struct, frozen=True):
    """One more rehearsal, and the sentence that says why."""

    request: RehearsalRequest
    why: str
    in_vain: str = ""
    """What the sentence ends with where the script cannot continue without what is absent: then the try counts for
    nothing."""
    proved: Trouble | None = None
    """What the rehearsal before it has proved, and this one leaves out to show the rest."""


class Shown(msgspec.Struct, frozen=True):
    """What the rehearsals of a script showed."""

    record: RunRecord
    """The one that counts."""
    section: RehearsalSection
    request: RehearsalRequest
    """How the newest one was made."""
    proofs: tuple[tuple[Trouble, RunRecord], ...] = ()
    """What earlier ones proved."""


def rehearse_until_shown(
    request: RehearsalRequest,
    rehearse_once: Callable[[RehearsalRequest], tuple[RunRecord, RehearsalSection]],
    hint_of: Callable[[RunRecord], str] = lambda record: "",
) -> Shown:
    """Rehearse, and again where that may show more; the last rehearsal, with what has to be said of those before.

    A rehearsal without the weights of a checkpoint, or with an empty directory, that fails for lack of what is absent
    says nothing of the script: then the one counts that found it missing, and ``hint_of`` says what to do about that
    and all else that the others missed.
    """
    record, section = rehearse_once(request)
    notes: tuple[str, ...] = ()
    proofs: tuple[tuple[Trouble, RunRecord], ...] = ()
    lacking: tuple[RunRecord, RehearsalSection, tuple[str, ...]] | None = None
    for _ in range(TRIES - 1):
        found = another_try(request, record, section)
        if found is None:
            break
        if found.in_vain and lacking is None:
            lacking = record, section, (*notes, f"{found.why}, {found.in_vain}")
        if found.proved is not None:
            proofs = (*proofs, (found.proved, record))
        # A script that has not trained has taken its time to start, and the next start takes it again.
        spent_s = request.spent_s + (section.seconds if section.steps else 0.0)
        request, notes = msgspec.structs.replace(found.request, spent_s=spent_s), (*notes, found.why)
        before = record, section
        record, section = rehearse_once(request)
        too_slow = record.job.stop_reason in ("time-limit", "slow", "memory") and section.steps <= before[1].steps
        if request.batch_size == 0 and too_slow:
            record, section = before
            notes = (*notes[:-1], f"{found.why}, and this machine is too small for it")
            break
    if lacking is not None and _fails_without(record, section, lacking[1].steps):
        why, pretended = _what_stopped(record, section), record.job.pretended
        record, section, notes = lacking
        job = msgspec.structs.replace(record.job, pretended=pretended)
        hint = hint_of(msgspec.structs.replace(record, job=job)) or section.hint
        section = msgspec.structs.replace(section, hint=hint)
        notes = (*notes[:-1], f"{notes[-1]}: {why}" if why else notes[-1])
    if notes:
        section = msgspec.structs.replace(section, notes=(*section.notes, *notes))
    return Shown(record, section, request, proofs)


def _what_stopped(record: RunRecord, section: RehearsalSection) -> str:
    """Return the first error of a rank; where none raised, what the rehearsal says."""
    raised = [
        (error.time_ns, rank.rank, error)
        for rank in record.ranks
        for error in rank.exceptions
        if not error.communication
    ]
    if not raised or " raised " in section.reason:
        return section.reason
    _, rank, error = min(raised, key=lambda entry: entry[:2])
    return f"rank {rank} raised {error.type}: {headline(error)}"


def _fails_without(record: RunRecord, section: RehearsalSection, steps_before: int) -> bool:
    """Return whether a rehearsal may have failed for more of a checkpoint, or of data, than the script was given."""
    raised = list(_exceptions(record))
    failed = section.status == "failed" or (section.status == "stopped" and bool(raised))
    return failed and (section.steps <= steps_before or any(_OF_NO_WEIGHTS in one.message for one in raised))


def another_try(request: RehearsalRequest, record: RunRecord, section: RehearsalSection) -> Try | None:
    """Return the rehearsal that leaves out what may have failed this one; None where the script is at fault."""
    if record.job.stop_reason == "rendezvous":
        return _with_the_other_nodes_ranks(request, record)
    if record.job.stop_reason == "cut":
        return _with_longer_passes(request, section)
    if section.status != "failed" and not _left_others_waiting(record):
        return None
    return (
        _past_a_race(request, record)
        or _with_pretended_gpus(request, record, section)
        or _with_the_jobs_ranks(request, record, section)
        or _with_the_jobs_gpus(request, record, section)
        or _with_apex_pretended(request, record)
        or _with_packages_unseen(request, record)
        or _with_random_weights(request, record)
        or _with_empty_directories(request, record)
        or _with_listed_data(request, record)
        or _with_slurms_variables(request, record)
        or _with_few_labels(request, record)
        or _with_whole_batches(request, record, section)
    )


def _left_others_waiting(record: RunRecord) -> bool:
    """Return whether the rehearsal stopped at ranks that wait for one that had raised: a failure like others."""
    return record.job.stop_reason == "proof" and any(_exceptions(record))


def _with_longer_passes(request: RehearsalRequest, section: RehearsalSection) -> Try | None:
    """Code that takes several batches a step, or divides by what it has counted, met the end of a shortened pass."""
    if request.batches >= LONGER_PASSES or request.full:
        return None
    why = f"{section.reason}; rehearsed again with up to {LONGER_PASSES} batches in a pass"
    return Try(msgspec.structs.replace(request, batches=LONGER_PASSES), why)


def _past_a_race(request: RehearsalRequest, record: RunRecord) -> Try | None:
    """Which rank comes second to a directory is chance: that one fails is shown, and what comes behind it is not."""
    ending = (race for race in races(record) if race.died is not None and race.second.action == "make")
    race = next(ending, None)
    if race is None or race.trouble != "path-race" or request.shares_directories:
        return None
    why = (
        f"rank {race.second.rank} failed because rank {race.first.rank} had made {PurePath(race.path).name}; rehearsed "
        "again without that failure"
    )
    changed = msgspec.structs.replace(request, shares_directories=True)
    return Try(changed, why, proved=race.trouble)


def _with_pretended_gpus(request: RehearsalRequest, record: RunRecord, section: RehearsalSection) -> Try | None:
    """A script that asks for GPUs before it starts, in words that its source does not show, found none."""
    if request.device != "auto" or record.job.device != "cpu" or record.steps():
        return None
    raised = list(_exceptions(record))
    # A script that counts GPUs and finds too few says so and leaves, without an exception.
    left = request.may_use_gpus and not record.wraps and not any(rank.exit_code == USAGE for rank in record.ranks)
    if not (any(map(_is_about_gpus, raised)) if raised else left):
        return None
    why = (
        f"without a GPU the script reached no step: {section.reason}; rehearsed again with the CPU standing in for "
        "a GPU"
    )
    return Try(msgspec.structs.replace(request, device="stand-in"), why)


def _with_the_jobs_gpus(request: RehearsalRequest, record: RunRecord, section: RehearsalSection) -> Try | None:
    """A script that names the GPUs of its job (``--device 0,1,2,3``), or spawns a rank for each, wants them all.

    Only one that cannot continue with a GPU a rank gets more: who takes their number for that of the ranks is right
    there. The job's node has at least the GPUs that its launcher starts ranks for, and one for each that it spawns.
    """
    if request.nodes > 1 or record.job.device != "stand-in" or record.steps():
        return None
    launch, raised = request.launch, list(_exceptions(record))
    gpus = request.gpus_per_node or request.nproc
    wanted = gpus_for_the_ranks(record)
    if launch.has_launcher and any(map(_is_about_gpus, raised)):
        wanted = max(wanted, (launch.ranks or 0) // launch.nodes)
    if not wanted and request.spawns_ranks and not record.ranks and all(map(_is_about_gpus, raised)):
        wanted = 2 * gpus  # It counts GPUs, and leaves where there are too few.
    if not gpus < wanted <= MOST_GPUS:
        return None
    why = f"with {gpus} GPUs {section.reason}; rehearsed again with the {wanted} GPUs of the job's node"
    return Try(msgspec.structs.replace(request, gpus_per_node=wanted), why)


def _with_the_jobs_ranks(request: RehearsalRequest, record: RunRecord, section: RehearsalSection) -> Try | None:
    """A mesh of a fixed shape, or a count of the GPUs, wants the ranks that the launcher of the job starts."""
    ranks, most = request.launch.ranks or 0, request.nproc
    if request.nodes > 1 or request.launch.nodes > 1 or record.steps() or not most < ranks <= MOST_GPUS:
        return None
    raised = list(_exceptions(record))
    few = any(_speaks(one, _SPEAKS_OF_RANKS) for one in raised) or (
        not raised and _SPEAKS_OF_GPUS.search(section.output)
    )
    if not few or request.gpus_per_node:
        return None
    why = f"on {most} ranks {section.reason}; rehearsed again on the {ranks} of the command"
    return Try(msgspec.structs.replace(request, nproc=ranks), why)


def _with_the_other_nodes_ranks(request: RehearsalRequest, record: RunRecord) -> Try | None:
    """A command for one of several nodes of one GPU spawns one rank of the group: those of the others run here, too."""
    asked = max((wait.ranks_asked for wait in record.waits), default=0)
    ranks = min(asked, request.nproc)
    if not request.spawns_ranks or request.spawned_ranks or ranks < 2:
        return None
    why = f"the script starts 1 of the {asked} ranks of its group; rehearsed again with {ranks} on this machine"
    changed = msgspec.structs.replace(request, spawned_ranks=ranks)
    return Try(changed, why, "which does not work for this script")


def _with_apex_pretended(request: RehearsalRequest, record: RunRecord) -> Try | None:
    """Apex is built for the GPUs of the job and cannot be installed here; only a script that ends without it gets
    torch's classes in its place, since many take another way where it is missing.
    """
    lacks = any(_LACKS_APEX.search(raised.message) or _misses_apex(raised) for raised in _exceptions(record))
    if not request.pretend or not lacks or _APEX in request.absent_packages:
        return None
    why = f"{_APEX} is not installed; rehearsed again with torch's own classes in its place"
    return Try(msgspec.structs.replace(request, absent_packages=(*request.absent_packages, _APEX)), why)


def _with_packages_unseen(request: RehearsalRequest, record: RunRecord) -> Try | None:
    """Much that a script imports only takes: plots, logs, types, models that are not chosen.

    Whether the script looks at what a package gives, only a try without it tells; it also tells what else is missing.
    """
    lacks = (lack_behind(raised) for raised in _exceptions(record))
    missing = next((lack.name for lack in lacks if lack is not None and lack.kind == "package" and lack.name), "")
    if not missing or "." in missing or not request.pretend or request.unseen_packages:
        return None
    if UserCode(str(request.script.parent)).has_module(missing):
        return None
    why = f"{missing} is not installed; rehearsed again without the packages that are missing"
    return Try(msgspec.structs.replace(request, unseen_packages=True), why, "which does not work for this script")


def _misses_apex(raised: RankException) -> bool:
    lack = lack_behind(raised)
    return lack is not None and lack.kind == "package" and lack.name.partition(".")[0] == _APEX


def _with_random_weights(request: RehearsalRequest, record: RunRecord) -> Try | None:
    """Stand in for a checkpoint of an earlier job; whether a script does without one, only its failure tells."""
    for raised in _exceptions(record):
        path = _weights_missed(raised)
        if not request.pretend or not path or path in request.absent_weights:
            continue
        if is_written_by_ranks(raised.message, record):
            continue  # It is there, or will be: whoever reads it came too early.
        why = f"{path} does not exist; rehearsed again with a stand-in that leaves weights as they begin"
        absent = (*request.absent_weights, path)
        return Try(msgspec.structs.replace(request, absent_weights=absent), why, "which does not work for this script")
    return None


def _weights_missed(raised: RankException) -> str:
    """Return the file of weights that is not there, as the script names it; empty where it fails for something else."""
    if _OF_TORCH_LOAD in raised.traceback.replace("\\", "/"):
        path = _NO_FILE.search(raised.message) if raised.type == "FileNotFoundError" else None
        return path[1] if path is not None else ""
    named = _WEIGHTS_FILE.search(raised.message)
    return named[0] if named is not None and not os.path.exists(named[0]) else ""


def _with_empty_directories(request: RehearsalRequest, record: RunRecord) -> Try | None:
    """A script that asks for its directory of data before it reads them may continue where all in it is pretended."""
    if not request.pretend or not record.job.overlay:
        return None
    lacks = [raised.message for raised in _exceptions(record) if _asks_for_data(raised)]
    for argument in request.arguments:
        path = (argument.partition("=")[2] if argument.startswith("--") else argument).rstrip(os.sep)
        # A name with an ending is that of a file.
        directory = os.sep in path and not os.path.splitext(path)[1] and not os.path.exists(path)
        if not directory or path in request.absent_directories:
            continue
        if any(re.search(rf"(?<![\w/.]){re.escape(path)}(?![\w/-]|\.\w)", text) for text in lacks):
            absent = (*request.absent_directories, path)
            why = f"{path} does not exist; rehearsed again with an empty directory in its place"
            changed = msgspec.structs.replace(request, absent_directories=absent)
            return Try(changed, why, "which does not work for this script")
    return None


def _with_listed_data(request: RehearsalRequest, record: RunRecord) -> Try | None:
    """A script that lists its pictures or sounds itself continues where it is given names for them, and one that has
    looked for a file of numbers where it is told that this is there.
    """
    lacks = ((raised, lack_behind(raised, record)) for raised in _exceptions(record))
    missed = next((raised for raised, lack in lacks if lack is not None and lack.kind == "data"), None)
    missing = headline(missed) if missed is not None else ""
    if not missing and any(loader.dataset_length == 0 for loader in record.loaders):
        missing = "a data set has no samples"
    if not request.pretend or request.absent_data or not missing:
        return None
    why = f"data are missing ({missing}); rehearsed again with pretended names in what the script lists"
    changed = msgspec.structs.replace(request, absent_data=missed.message if missed is not None else missing)
    return Try(changed, why, "which does not work for this script")


def _asks_for_data(raised: RankException) -> bool:
    """Return whether a script has looked whether its data are there; one that has opened them needs what is in them."""
    lack = lack_behind(raised)
    return lack is not None and lack.kind == "data" and "[Errno" not in raised.message


def _with_few_labels(request: RehearsalRequest, record: RunRecord) -> Try | None:
    """What has no name that tells the number of its classes gets more labels than some models have."""
    beyond = next((found[0] for one in _exceptions(record) if (found := _OF_LABELS.search(one.message))), None)
    if beyond is None or not record.job.pretended or request.few_labels:
        return None
    why = f"a pretended label is beyond the classes of the model ({beyond}); rehearsed again with two labels"
    return Try(msgspec.structs.replace(request, few_labels=True), why)


def _with_slurms_variables(request: RehearsalRequest, record: RunRecord) -> Try | None:
    """A script that ``srun`` starts for each rank reads from Slurm which one it is."""
    missing = next((raised for raised in _exceptions(record) if _OF_SLURM.fullmatch(raised.message)), None)
    if missing is None or missing.type != "KeyError" or request.tells_slurm or request.spawns_ranks:
        return None
    why = f"the script reads {missing.message.strip(chr(39))}; rehearsed again with the variables that Slurm sets"
    return Try(msgspec.structs.replace(request, tells_slurm=True), why)


def _with_whole_batches(request: RehearsalRequest, record: RunRecord, section: RehearsalSection) -> Try | None:
    """Code that splits a batch, or normalises parts of it, has nothing left to split in a batch of two samples."""
    samples = int(record.job.batch_size or 0)
    larger = any(loader.batch_size is None or loader.batch_size > samples for loader in record.loaders)
    if not samples or not larger or not record.passes or not any(map(_is_about_sizes, _exceptions(record))):
        return None
    why = f"with batches cut to {samples} samples {section.reason}; rehearsed again with whole batches"
    return Try(msgspec.structs.replace(request, batch_size=0), why)


def _exceptions(record: RunRecord) -> Iterator[RankException]:
    yield from record.job.early_exceptions
    for rank in record.ranks:
        yield from (raised for raised in rank.exceptions if not raised.communication)


def _is_about_gpus(raised: RankException) -> bool:
    return _speaks(raised, _SPEAKS_OF_GPUS)


def _speaks(raised: RankException, words: re.Pattern[str]) -> bool:
    last = "\n".join(raised.traceback.rstrip().splitlines()[-_LAST_LINES:])
    missing = raised.type in ("ModuleNotFoundError", "ImportError", "FileNotFoundError")
    return not missing and bool(words.search(_without_paths(f"{raised.message}\n{last}")))


def _is_about_sizes(raised: RankException) -> bool:
    words = _OF_ANY_SIZE.sub("", raised.message)
    in_words = raised.type in ("RuntimeError", "ValueError") and _SPEAKS_OF_SIZES.search(words)
    return bool(in_words) or raised.type in _OF_FEWER_SAMPLES


def _without_paths(text: str) -> str:
    """Without the names of files: a directory may be called after GPUs."""
    return re.sub(r'File "[^"]*"', "", text)
