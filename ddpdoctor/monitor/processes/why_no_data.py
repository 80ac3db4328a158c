"""Why a watched job shows nothing, or less than it should: what the user has to change, in one sentence."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from ddpdoctor.files.untrusted import read_start
from ddpdoctor.launch.environment import BOOT_DIRECTORY
from ddpdoctor.launch.interpreter import has_torch
from ddpdoctor.record import layout
from ddpdoctor.record.assembly.completeness import ancestors
from ddpdoctor.record.assembly.ranks import RankBook
from ddpdoctor.record.model import RunRecord

# Recognises scripts whose gradients are reduced by a library of its own, beside DistributedDataParallel.

_MOST_BYTES = 1_000_000
_LIBRARIES = (
    ("horovod", "Horovod"),
    ("smdistributed.modelparallel", "SageMaker's model-parallel library"),
    ("smdistributed.dataparallel.torch.parallel", "SageMaker's data-parallel library"),
    ("byteps", "BytePS"),
)
"""Modules and what people call them. SageMaker's newer data-parallel library is a backend of torch's process groups
(``torch_smddp``): DistributedDataParallel runs on it, and is measured."""
_LAUNCHERS = {"horovodrun": "Horovod", "bpslaunch": "BytePS"}


def library_of(script: str, program: str) -> str:
    """Return what people call the library that a script needs, or whose launcher starts it; empty where there is none.

    A script needs what it imports before anything else is decided, in column 0: an import under ``try`` or ``if`` is
    of a library that a DDP job may do without.
    """
    if program in _LAUNCHERS:
        return _LAUNCHERS[program]
    try:
        text = read_start(script, _MOST_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""
    imported = r"^(?:import|from)[ \t]+{}(?![\w])"
    found = (name for module, name in _LIBRARIES if re.search(imported.format(re.escape(module)), text, re.MULTILINE))
    return next(found, "")


def sentence(library: str) -> str:
    """Say that nothing is measured, and what of ddpdoctor works nevertheless; without a full stop."""
    return (
        f"{library} reduces the gradients of this script, not DistributedDataParallel, so its steps are not measured; "
        "`ddpdoctor check --static` reads it, `autopsy` explains its logs, and `autopsy --live` where its processes "
        "stand"
    )


COMPLAINS_AFTER_NS = 10_000_000_000
"""A job which has not reported for so long is complained of while it runs."""
LONG_WITHOUT_A_GROUP_NS = 120_000_000_000
"""A script that imports such a library may make a process group of torch's later: the imports and the reading of the
data come first, which take a minute or two from a disk of the network."""
LOOK_EVERY_NS = 1_000_000_000
_PASSING_ON = {
    "mpirun": "`mpirun -x DDPDOCTOR_RUN -x PYTHONPATH` (Open MPI) or `-genvlist DDPDOCTOR_RUN,PYTHONPATH` (MPICH)",
    "mpiexec": "`mpiexec -x DDPDOCTOR_RUN -x PYTHONPATH` (Open MPI) or `-genvlist DDPDOCTOR_RUN,PYTHONPATH` (MPICH)",
    "srun": "`srun --export=ALL`",
    "sbatch": "`sbatch --export=ALL`",
    "docker": "`docker run -e DDPDOCTOR_RUN -e PYTHONPATH`, with both directories mounted",
    "podman": "`podman run -e DDPDOCTOR_RUN -e PYTHONPATH`, with both directories mounted",
    "sudo": "`sudo --preserve-env=DDPDOCTOR_RUN,PYTHONPATH`",
    "ssh": "`ssh HOST env DDPDOCTOR_RUN=... PYTHONPATH=... COMMAND`, with both directories on that host",
}
_IGNORING = re.compile(r"-[a-zA-Z]*[EIS]")
_PYTHON = re.compile(r"python[\d.]*$")
_NO_TORCH = re.compile(r"No module named '?torch'?$")


class Silence:
    """Looks for the reason while the job runs, because its processes can be asked only then."""

    def __init__(self, launcher: int | None, command: tuple[str, ...], script: str = "") -> None:
        self._launcher = launcher
        self._command = command
        self._program = Path(command[0]).name if command else ""
        self._library = library_of(script, self._program)
        self._complaint = ""
        self._looked_at_ns = 0

    def look(self, book: RankBook, now_ns: int) -> None:
        """Look at the processes of a job that has written nothing yet."""
        done = self._launcher is None or bool(book.processes) or bool(self._complaint)
        if not done and now_ns - self._looked_at_ns >= LOOK_EVERY_NS:
            self._looked_at_ns = now_ns
            self._complaint = next(self._complaints(self._launcher or 0), "")

    def reason(self, book: RankBook, record: RunRecord, *, ended: bool) -> str:
        """Return why no step was measured, as a sentence without a full stop; empty while that may yet change."""
        if any(len(track) for track in record.step_tracks):
            return ""
        age_ns = record.job.ended_ns - record.job.started_ns
        if self._complaint and not book.processes:
            return self._complaint if ended or age_ns >= COMPLAINS_AFTER_NS else ""
        if exception := _without_torch(record, book):
            return f"the job's Python has no torch ({exception})"
        if self._library and not book.worlds and (ended or age_ns >= LONG_WITHOUT_A_GROUP_NS):
            return sentence(self._library)
        if not book.processes:
            return self._never_heard() if ended else ""
        if not ended:
            return ""
        if not book.worlds and len(record.ranks) > 1 and all(rank.main_finished for rank in record.ranks):
            return "none of the ranks created a process group: each ran on its own, and there was no DDP to watch"
        if not book.worlds:
            return "no process of the job created a process group, so there was no DDP to watch"
        return f"no rank {'trained a step' if record.wraps else 'wrapped a model in DistributedDataParallel'}"

    def _never_heard(self) -> str:
        if _PYTHON.match(self._program) and has_torch(self._command[0]) is False:
            return f"{self._command[0]} has no torch"
        if _PYTHON.match(self._program):
            return (
                "no process of the job created a process group: it trains without DDP, ended before, or starts its "
                f"ranks without the variables {layout.RUN_VARIABLE} and PYTHONPATH"
            )
        hint = _PASSING_ON.get(self._program, "")
        return (
            "no process of the job created a process group: it trains without DDP, ended before, or "
            f"{self._program or 'its launcher'} does not pass on the variables {layout.RUN_VARIABLE} and PYTHONPATH"
            + (f" (as {hint} does)" if hint else "")
        )

    def _complaints(self, launcher: int) -> Iterator[str]:
        """Yield what is wrong with the environment or the options of the Python processes below the launcher."""
        import psutil

        try:
            processes = [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]
        except psutil.Error:
            return
        for process in processes:
            try:
                words, environment = process.cmdline(), process.environ()
            except (psutil.Error, OSError):
                continue
            if not words or not _PYTHON.match(Path(words[0]).name):
                continue
            yield from _complaint(words, environment, self._program)


def two_runs(book: RankBook, *, at_once: bool = False) -> str:
    """Say that several jobs share the directory, as a sentence; empty when they do not.

    A launcher that starts a rank again runs the same job, as does a process that has the rank's own work done by one
    that it starts; ``at_once`` says that jobs of two launchers run together.
    """
    parents: dict[int, set[int]] = {}
    for pid, entry in book.processes.items():
        if entry.rank is not None and all(book.rank_of(above) != entry.rank for above in ancestors(book, pid)):
            parents.setdefault(entry.rank, set()).add(entry.parent)
    if all(len(launchers) < 2 for launchers in parents.values()):
        return ""
    if at_once:
        return "two jobs run here at once, and these are the figures of the newer: watch each separately"
    return "another job has started here, and these are its figures, not those of the previous one"


def missing_ranks(record: RunRecord) -> str:
    """Say that some ranks never reported, as a sentence; empty when all did."""
    expected, reported = record.job.world_size, len(record.job.ranks_reported)
    if not expected or reported >= expected:
        return ""
    return (
        f"{reported} of {expected} ranks reported; the others run elsewhere or without the probe, so transfer time "
        "may include waiting for them"
    )


def _complaint(words: list[str], environment: dict[str, str], program: str) -> Iterator[str]:
    hint = _PASSING_ON.get(program, "")
    passed = f": pass on {layout.RUN_VARIABLE} and PYTHONPATH" + (f", as in {hint}" if hint else "")
    if layout.RUN_VARIABLE not in environment:
        yield f"{program} starts Python without the variable {layout.RUN_VARIABLE}, so nothing is measured{passed}"
    elif str(BOOT_DIRECTORY) not in environment.get("PYTHONPATH", "").split(os.pathsep):
        yield f"{program} changes the variable PYTHONPATH, so nothing is measured: {BOOT_DIRECTORY} must stay in it"
    else:
        options = takewhile(lambda word: word.startswith("-"), words[1:])
        ignoring = next((word for word in options if _IGNORING.match(word)), "")
        if ignoring:
            yield f"Python is started with {ignoring}, which disables the probe, so nothing is measured: omit it"


def _without_torch(record: RunRecord, book: RankBook) -> str:
    """Return the exception that says that torch is not installed."""
    raised = [error.message for rank in record.ranks for error in rank.exceptions]
    raised += [event.message for event in book.early_exceptions()]
    return next(filter(_NO_TORCH.search, raised), "")
