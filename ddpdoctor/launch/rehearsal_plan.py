"""Decides how a launch is rehearsed: on how many ranks, for how long, and what has to be said about it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ddpdoctor.errors import UsageError
from ddpdoctor.launch.environment import given_local_rank, numbered_arguments
from ddpdoctor.launch.interpreter import TorchMissing, find_interpreter, search_path
from ddpdoctor.launch.request import Launch, Layout, RehearsalRequest, on_cpu

FEWEST_RANKS = 2
TIME_LIMIT_S = 110.0
"""The command reads the source and ends the ranks besides, and is over within two minutes."""
STAND_IN_SAMPLES = 2
"""Samples of a batch where a CPU does a GPU's work: the fewest that a batch norm takes. With 4, torch's example for
ImageNet took 82 s of CPU in place of 61."""
STRESSED_SAMPLES = 4
"""The same under stress: a last batch that is short has two samples, for one alone is a case of its own."""


def ranks_to_start(launch: Launch, nproc: int) -> int:
    """At most ``nproc`` ranks, and no more than the job has; two at least, because one rank shows nothing."""
    return nproc if launch.ranks is None else max(FEWEST_RANKS, min(nproc, launch.ranks))


def ranks_per_core(ranks: int) -> float:
    """Return how many ranks share a core, at least 1: they take so much longer."""
    return max(1.0, ranks / (os.cpu_count() or 1))


def refuse_layout(layout: Layout, launch: Launch, target: str, *, spawns_ranks: bool) -> None:
    """Raise UsageError where several nodes cannot be pretended to ranks that are started in that way."""
    if spawns_ranks:
        problem = f"{target} starts its ranks itself, on the node it runs on"
    elif launch.starter == "torch.distributed.launch":
        problem = "`torch.distributed.launch` passes each rank its local rank as an argument"
    else:
        return
    hint = "Launch it with torchrun, or omit `--layout`."
    raise UsageError(f"the layout {layout} cannot be pretended: {problem}", hint)


def batch_size(request: RehearsalRequest, device: str) -> int | None:
    """Samples that a batch is cut to; None to keep batches as they are."""
    if request.batch_size is not None:
        return request.batch_size or None
    if request.full or not in_a_gpus_place(request, device):
        return None
    return STRESSED_SAMPLES if request.stress else STAND_IN_SAMPLES


def in_a_gpus_place(request: RehearsalRequest, device: str) -> bool:
    """Return whether the CPU does what GPUs are meant for, pretended ones or none."""
    return device == "stand-in" or (device == "cpu" and _meant_for_gpus(request))


def _meant_for_gpus(request: RehearsalRequest) -> bool:
    """Return whether the ranks would train on GPUs where there are some: what finds none takes the CPU by itself."""
    launch = request.launch
    if launch.starter == "fabric":
        return launch.environment.get("LT_ACCELERATOR", "auto") != "cpu"
    if launch.starter == "accelerate":
        return launch.environment.get("ACCELERATE_USE_CPU", "").lower() != "true"
    return request.may_use_gpus


def time_limit_s(request: RehearsalRequest, ranks: int) -> float:
    """Return when a rehearsal on so many ranks has to be over; one after others gets half of the limit at least.

    Starts for ``--resume`` wait for the script's checkpoints, and have twice the time.
    """
    default_s = TIME_LIMIT_S * ranks_per_core(ranks) * (2 if request.snapshot_into or request.restore_from else 1)
    limit_s = default_s if request.time_limit_s is None else request.time_limit_s
    return max(limit_s - request.spent_s, limit_s / 2)


def module_places(launch: Launch, python: str | None, *, static: bool) -> tuple[Path, ...]:
    """Return the directories in which ``python -m`` looks for a module of the user's, the working directory first.

    With ``static`` no interpreter is asked, and ``src`` stands for what an editable installation adds.
    """
    here = Path.cwd()
    paths = {**os.environ, **launch.environment}.get("PYTHONPATH", "")
    places = [here, *(here / path for path in paths.split(os.pathsep) if path)]
    if static:
        places.append(here / "src")
    else:
        try:
            places += map(Path, search_path(find_interpreter(python, launch).path))
        except TorchMissing:
            places.append(here / "src")
    return tuple(place for place in dict.fromkeys(places) if place.is_dir())


def has_launcher(request: RehearsalRequest) -> bool:
    """Return whether a launcher sets the rendezvous of the ranks: Slurm does not, nor a start by hand."""
    return not request.tells_slurm and numbered_arguments(request) == request.arguments


def option_passed(request: RehearsalRequest) -> str:
    """Return the option that the command's own launcher writes in another way than the script takes it; or nothing."""
    by_old_launcher = request.launch.starter == "torch.distributed.launch"
    return request.local_rank_option if by_old_launcher and given_local_rank(request) else ""


def notes_before(request: RehearsalRequest, device: str) -> Iterator[str]:
    """Yield what a rehearsal on ``device`` does otherwise than the command, in sentences."""
    launch = request.launch
    if launch.starter == "python" and not request.spawns_ranks:
        yield f"`python` alone starts one process; the script was started as by torchrun, on {request.nproc} ranks"
    if numbered_arguments(request) != request.arguments:
        yield f"the arguments name one rank ({', '.join(request.rank_options)}); each rank got its own"
    if given_local_rank(request):
        option = request.local_rank_option
        does = "takes" if launch.starter == "torch.distributed.launch" else "requires"
        yield f"the script {does} {option}, which torch's launcher does not pass; each rank got its own"
    precision = launch.environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if device == "cpu" and precision != on_cpu(launch.environment).get("ACCELERATE_MIXED_PRECISION", precision):
        yield f"mixed precision {precision} needs a GPU; rehearsed in full precision"
    if launch.ranks == 1:
        yield f"the command starts 1 rank, which leaves nothing to compare: rehearsed on {request.nproc}"


def notes_after(request: RehearsalRequest, world_size: int) -> Iterator[str]:
    """Yield the same, of what is known only when the ranks have started."""
    if request.spawns_ranks and world_size and request.nproc not in (FEWEST_RANKS, world_size):
        yield f"the script starts its {world_size} ranks itself, so `--nproc {request.nproc}` was ignored"
