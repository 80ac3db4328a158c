"""The environment and the command line of a rehearsal."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ddpdoctor.errors import UsageError
from ddpdoctor.launch.launcher_options import without_wrappers
from ddpdoctor.launch.request import Launch, RehearsalRequest
from ddpdoctor.probe.free_port import free_port
from ddpdoctor.record import layout

# The command of a job that is watched: the user's own, or the script under torch's launcher.

RANKS_WITHOUT_GPU = 2


class ObservedCommand(msgspec.Struct, frozen=True, kw_only=True):
    """What is started, and how."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = {}
    """Variables that the command line sets."""
    without: tuple[str, ...] = ()
    """Variables that the command line takes away."""
    script: str = ""
    """Path of the script as it is written, where it can be made out."""
    arguments: tuple[str, ...] = ()
    """The script's own."""
    python: str = ""
    """Interpreter of the ranks, where it is known."""

    @property
    def name(self) -> str:
        """What people call the run."""
        return Path(self.script or self.words[0]).name


def script_command(
    python: str, script: str, arguments: Sequence[str], ranks: int, *, module: bool, spawns_ranks: bool
) -> ObservedCommand:
    """Return the command that starts a script on so many ranks of this machine by torch's launcher.

    A script that starts its ranks itself is started by Python alone.
    """
    target = ("-m", script) if module else (script,)
    if spawns_ranks:
        words: tuple[str, ...] = (python, *target, *arguments)
    else:
        words = (
            *(python, "-m", "torch.distributed.run"),
            *(f"--nproc-per-node={ranks}", "--nnodes=1", "--node-rank=0"),
            *(f"--master-addr={LOOPBACK}", f"--master-port={free_port()}"),
            # Without `--` the launcher reads the script's options, too, and stumbles over beginnings of its own.
            *(("-m",) if module else ()),
            *("--", script, *arguments),
        )
    return ObservedCommand(words=words, script=script, arguments=tuple(arguments), python=python)


def launch_command(words: Sequence[str]) -> ObservedCommand:
    """Return the command as the user gives it, environment assignments in front included.

    Raises UsageError when there is no such program.
    """
    wrapped = without_wrappers(words)
    program = wrapped.words[0]
    if shutil.which(program) is None:
        where = "no such program" if os.sep in program else "no such program on the PATH"
        raise UsageError(f"{program}: {where}", "Write the launch command after `--` as you would write it alone.")
    index = next((number for number, word in enumerate(wrapped.words) if word.endswith(".py")), None)
    return ObservedCommand(
        words=wrapped.words,
        environment=wrapped.environment,
        without=wrapped.without,
        script=wrapped.words[index] if index is not None else "",
        arguments=wrapped.words[index + 1 :] if index is not None else (),
    )


LOOPBACK = "127.0.0.1"
BOOT_DIRECTORY = Path(__file__).resolve().parent.parent / "probe" / "boot"

BARE_RANKS = str(Path(__file__).with_name("bare_ranks.py"))

THREADS_VARIABLE = "OMP_NUM_THREADS"
_LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "DDPDOCTOR_RANK_PROCESS",
)  # fmt: skip
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "PET_")
"""What torch's launcher sets, and what it takes for options of its own."""
_LOCAL_RANK = "${local_rank}"
"""The launcher puts the number of each rank in its place."""
_NOTHING_SAID = Launch()
_TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "DISABLED",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
}
LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
"""Without the network the address that the host's name stands for is that of no interface."""


def rehearsal_environment(
    run_directory: Path, environment: Mapping[str, str], launch: Launch = _NOTHING_SAID, *, spawns_ranks: bool = False
) -> dict[str, str]:
    """Return the environment of the user and of the launch command, with the probe in it and without an outer
    launcher's.

    A script that starts its own ranks keeps what the command sets for it, and its rendezvous on this machine.
    """
    given = {name: value for name, value in environment.items() if name not in launch.without}
    given |= launch.environment
    result = {name: value for name, value in given.items() if not name.startswith(_LAUNCHER_PREFIXES)}
    for name in _LAUNCHER_VARIABLES:
        result.pop(name, None)
    if spawns_ranks:
        result |= {name: value for name, value in launch.environment.items() if name in _LAUNCHER_VARIABLES}
        if "MASTER_ADDR" in given:
            result["MASTER_ADDR"] = LOOPBACK
        if "MASTER_PORT" in given:
            result["MASTER_PORT"] = str(free_port())
    result |= observed(run_directory, result)
    # The user's tree must look the same afterwards, byte code included.
    result["PYTHONDONTWRITEBYTECODE"] = "1"
    result.setdefault(THREADS_VARIABLE, "1")
    # MLflow has no switch; what it writes goes with the run directory.
    return result | _TRACKERS_OFF | {"MLFLOW_TRACKING_URI": (run_directory / "mlruns").as_uri()}


def without_launcher(count: int) -> dict[str, str]:
    """Return what torch's launcher says to so many ranks, and to the only one also which it is.

    Without the launcher, which imports torch before the ranks do, a run of one process took 3.6 s in the place of
    6.0 s (three pairs).
    """
    only = ("RANK", "LOCAL_RANK", "ROLE_RANK") if count == 1 else ()
    ranks = dict.fromkeys((*only, "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), "0")
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(count))
    own = {"GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": "none"}
    return {**ranks, **sizes, **own, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())}


def chooses_threads(environment: Mapping[str, str], launch: Launch) -> bool:
    """Return whether the user or the launch command says on how many threads a rank computes."""
    given = {name for name in environment if name not in launch.without} | launch.environment.keys()
    return THREADS_VARIABLE in given


def observed(run_directory: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that wake the probe in every Python process that is started with them.

    They are all that a live run needs: where the run directory holds no plan, its first process writes one.
    """
    path = environment.get("PYTHONPATH", "")
    return {
        layout.RUN_VARIABLE: str(run_directory),
        "PYTHONPATH": str(BOOT_DIRECTORY) + (os.pathsep + path if path else ""),
    }


def rehearsal_command(request: RehearsalRequest, python: str, output: Path) -> list[str]:
    """Return the command that starts the ranks: torch's launcher, or the script alone when it starts them itself."""
    flags, script = (["-m"], [request.module]) if request.module else ([], [str(request.script)])
    options = request.launch.python_options
    if request.spawns_ranks:
        return [python, *options, "-u", *flags, *script, *request.arguments]
    if request.needs_no_launcher:
        words = (*given_local_rank(request), *numbered_arguments(request))
        command = [python, *options, "-u", *flags, *script, *words]
        if request.nproc == 1:
            return [word.replace(_LOCAL_RANK, "0") for word in command]
        return [python, "-IS", BARE_RANKS, str(request.nproc), _LOCAL_RANK, *command]
    by_old_launcher = request.launch.starter == "torch.distributed.launch"
    passes_local_rank = by_old_launcher and not given_local_rank(request)
    if options:
        # torch's launcher starts its own Python, without options, unless it is set to start none.
        flags, script = ["--no-python"], [python, *options, "-u", *flags, *script]
    return [
        python,
        "-m",
        "torch.distributed.launch" if passes_local_rank else "torch.distributed.run",
        f"--nproc-per-node={request.nproc}",
        "--nnodes=1",
        "--node-rank=0",
        f"--master-addr={LOOPBACK}",
        f"--master-port={free_port()}",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        f"--log-dir={output}",
        "--redirects=3",
        *flags,
        # Without it the launcher reads the script's options too, and stumbles over beginnings of its own (`--run`).
        "--",
        *script,
        # As torch's old launcher does it: what takes all that is left, as a list of settings, would take it, too.
        *given_local_rank(request),
        *numbered_arguments(request),
    ]


def numbered_arguments(request: RehearsalRequest) -> tuple[str, ...]:
    """Return the script's arguments, and in the place of a rank's number the one of each rank.

    Who starts such a script by plain Python does it once for every rank, each time with another number.
    """
    if request.launch.has_launcher or request.spawns_ranks or request.nodes > 1:
        return request.arguments
    numbered = list(request.arguments)
    for index, argument in enumerate(numbered):
        option, _, value = argument.partition("=")
        if option not in request.rank_options:
            continue
        if value.isdigit():
            numbered[index] = f"{option}={_LOCAL_RANK}"
        elif index + 1 < len(numbered) and numbered[index + 1].isdigit():
            numbered[index + 1] = _LOCAL_RANK
    return tuple(numbered)


def given_local_rank(request: RehearsalRequest) -> tuple[str, ...]:
    """Return the local rank as an argument if a script does not start without: the launcher fills it in for each."""
    option = request.local_rank_option
    passed = any(argument.partition("=")[0] == option for argument in request.arguments)
    by_launcher = request.launch.starter == "torch.distributed.launch" and option == "--local-rank"
    if not option or passed or by_launcher or request.spawns_ranks or request.nodes > 1:
        return ()
    return (f"{option}={_LOCAL_RANK}",)
