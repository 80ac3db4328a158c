"""What is asked of a rehearsal, and what it says while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import msgspec

from ddpdoctor.errors import UsageError
from ddpdoctor.files import regex
from ddpdoctor.record.streams.setup import JobMachine

Stress = Literal["", "nan", "short-batch", "slow-rank0"]
STRESSES: tuple[Stress, ...] = get_args(Stress)[1:]
Starter = Literal["", "python", "torchrun", "torch.distributed.launch", "accelerate", "fabric"]
"""What starts the ranks of the job; empty when a script was named and nothing said how it is started."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How the user starts the job, as far as a rehearsal can do the same."""

    starter: Starter = ""
    module: bool = False
    """The target is a module, as in ``python -m package.train``."""
    ranks: int | None = None
    """Ranks of the whole job; None when nothing says how many."""
    nodes: int = 1
    """Nodes that they are spread over."""
    program: str = ""
    """Python of the environment that the command belongs to; empty when it names none."""
    must_use_program: bool = False
    """The user named that environment by a path, so no other will do."""
    python_options: tuple[str, ...] = ()
    """Options of the interpreter that runs the script, such as ``-O``."""
    environment: Mapping[str, str] = {}
    """Variables that the command sets."""
    without: tuple[str, ...] = ()
    """Variables that the command takes away."""

    @property
    def has_launcher(self) -> bool:
        """Whether the ranks are started by a launcher, and so not by the script."""
        return self.starter not in ("", "python")


class LaunchLine(msgspec.Struct, frozen=True, kw_only=True):
    """What a launch command starts."""

    target: str
    """Path of the script as it is written, or the dotted name of a module."""
    arguments: tuple[str, ...]
    """The script's own."""
    launch: Launch


class RehearsalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a script is to be rehearsed, as far as the user says so."""

    arguments: tuple[str, ...] = ()
    """The script's own."""
    launch: Launch = Launch()
    """How the job is started; ``ddpdoctor.launch.command_line`` reads it from a command."""
    nproc: int = 2
    """Ranks of all nodes; fewer when the job has fewer."""
    batches: int = 4
    """Batches that a pass over a loader yields before it is cut short."""
    full: bool = False
    """Nothing is cut: every pass yields all its batches, and the script ends by itself."""
    batch_size: int | None = None
    """Samples that a batch is cut to; 0 keeps batches as they are; None lets the device decide."""
    time_limit_s: float | None = None
    """None for a limit that grows with the ranks that share a core."""
    stall_after_s: float = 5.0
    """A rank without any sign of life for so long, while others wait for it, is stuck."""
    python: str | None = None
    """Interpreter for the ranks; None: found by ``launch.interpreter``."""
    device: Device = "auto"
    """Real GPUs, the CPU, or the CPU in the place of GPUs (``stand-in``); ``auto`` is decided by ``chosen_device``."""
    overlay: bool = True
    """What the ranks write goes to an overlay, where the kernel allows one and ``allow_writes`` is not set."""
    network: bool | None = None
    """Whether the ranks reach the network and this machine's ports; None: only where no box can keep them from it."""
    sockets: tuple[Path, ...] = ()
    """Unix sockets of programs outside that the ranks may reach."""
    pretend: bool = True
    """Data sets, pretrained weights and trackers that this machine lacks are pretended."""
    allow_writes: bool = False
    """The ranks may change files that existed before."""
    keep: bool = False
    """Files that the ranks made stay: where they were made, or as the upper layers of the overlay."""


TORN = "torn"
"""The folder of a snapshot that the start after a save which was broken off takes its files from."""
SIGNALLED = "signalled"
"""The folder of what a start leaves that a scheduler's signal has ended."""


class RehearsalRequest(RehearsalOptions, frozen=True, kw_only=True):
    """A script to rehearse, and the bounds of the rehearsal."""

    script: Path
    """Absolute path."""
    module: str = ""
    """Dotted name of the script when it is run as a module."""
    spawns_ranks: bool = False
    """The script starts its ranks itself (``mp.spawn``), so it is run by plain Python."""
    nodes: int = 1
    """Nodes that are pretended, with equally many ranks each."""
    slurm: bool = False
    """The script reads Slurm's variables, so the layout is set in them too."""
    spent_s: float = 0.0
    """What earlier rehearsals of the same script took of the limit."""
    local_rank_option: str = ""
    """An option for the local rank that the script does not start without (``--local_rank``)."""
    rank_options: tuple[str, ...] = ()
    """Spellings of the option by which the script takes its rank."""
    demands_cuda: bool = False
    """The script demands CUDA or NCCL whatever the machine has."""
    may_use_gpus: bool = False
    """The script speaks of CUDA, or of a framework that trains on GPUs where there are some."""
    machine: JobMachine = JobMachine()
    """What the project says of the machines of its job."""
    stress: Stress = ""
    """A cause to inject on one rank."""
    gpus_per_node: int = 0
    """GPUs that a pretended node has; 0 for as many as it has ranks."""
    snapshot_into: Path | None = None
    """For ``--resume``: where the files of its second checkpoint are copied to, and those that a death amid the next
    save leaves. Steps and checkpoints are noted."""
    restore_from: Path | None = None
    """The same of a start that follows: the folder that such files are taken from, ``second-N``, ``torn`` or
    ``signalled``. With both, it is one that a scheduler's signal ends."""
    tells_slurm: bool = False
    """The ranks find what Slurm would tell them, which they asked for in an earlier try."""
    spawned_ranks: int = 0
    """Ranks to spawn where the script spawns one of a group's several, as an earlier try showed; 0 to leave it."""
    absent_weights: tuple[str, ...] = ()
    """Checkpoints that ``torch.load`` did not find in an earlier try, and that stand for nothing in this one."""
    absent_data: str = ""
    """What an earlier try said of data that it lacked: what the script lists, and lists in text files, gets pretended
    names, and what it looks for beside a file that is named here is there."""
    absent_packages: tuple[str, ...] = ()
    """Packages that an earlier try did not find, and that torch's own classes stand for in this one."""
    few_labels: bool = False
    """The labels of pretended data were beyond the classes of the model: these have two."""
    unseen_packages: bool = False
    """An earlier try did not find a package: what takes everything stands for those whose absence ends the script."""
    absent_directories: tuple[str, ...] = ()
    """Directories of data that an argument names and an earlier try did not find; empty ones stand for them."""
    equivalence: Mapping[str, object] | None = None
    """How this run takes part in a comparison with one process; ``examine.equivalence`` makes it."""
    first_steps: Path | None = None
    """An empty directory for what the ranks of such a run keep of their first steps."""
    shares_directories: bool = False
    """An earlier try ended by a race of the ranks for a directory; in this one no rank fails for coming second."""

    @property
    def needs_no_launcher(self) -> bool:
        """Whether its ranks are compared, with one process or another launch: how they are started is of no matter."""
        by_old_launcher = self.launch.starter == "torch.distributed.launch"
        return self.equivalence is not None and not self.spawns_ranks and not by_old_launcher


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """One line of news about a rehearsal that runs."""

    phase: str
    """A few words: ``starting 2 ranks``, ``training``, ``ending``."""
    steps: int = 0
    seconds: float = 0.0


# Layouts of nodes, how many GPUs this machine offers to a job, and what the ranks of a rehearsal run on.

_SHAPE = regex(r"(\d{1,3})x(\d{1,3})")
FEWEST_RANKS = 2
"""With one rank there is nothing to compare."""
MOST_RANKS = 64


class Layout(msgspec.Struct, frozen=True):
    """So many nodes with so many ranks each."""

    nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.ranks_per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}"


def parse_layout(text: str) -> Layout:
    """Read ``NODESxRANKS``; raises UsageError for what is none, and for too few or too many ranks."""
    match = _SHAPE.fullmatch(text.strip().lower())
    if match is None or not int(match[1]) * int(match[2]):
        raise UsageError(
            f"`{text}` is not a layout", "Write NODESxRANKS, such as 2x1 for two nodes with one rank each."
        )
    layout = Layout(int(match[1]), int(match[2]))
    if not FEWEST_RANKS <= layout.ranks <= MOST_RANKS:
        raise UsageError(
            f"the layout {layout} has {layout.ranks} rank{'' if layout.ranks == 1 else 's'}; a rehearsal runs "
            f"{FEWEST_RANKS} to {MOST_RANKS}"
        )
    return layout


Device = Literal["auto", "cpu", "cuda", "stand-in"]
DEVICES: tuple[Device, ...] = get_args(Device)

HIDE_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
"""With fewer GPUs than ranks a rehearsal runs on the CPU, and the script must see that there is none."""

_NEEDS_A_GPU = ("fp16", "fp8")


def on_cpu(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what has to be set so that ranks without a GPU of their own run on the CPU.

    Accelerate makes each rank a job of its own there, unless it is told to use the CPU; and there is no fp16 on it.
    """
    result = {"ACCELERATE_USE_CPU": "true"}
    if environment.get("ACCELERATE_MIXED_PRECISION", "") in _NEEDS_A_GPU:
        result["ACCELERATE_MIXED_PRECISION"] = "no"
    # Fabric takes the accelerator and the precision of its command from the environment.
    if "LT_ACCELERATOR" in environment:
        result["LT_ACCELERATOR"] = "cpu"
    if environment.get("LT_PRECISION", "").startswith("16"):
        result["LT_PRECISION"] = "32-true"
    return result


def visible_gpus(environment: Mapping[str, str]) -> int:
    """GPUs that a process with this environment may use; 0 without a driver."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    present = _present_gpus()
    if named is None:
        return present
    entries = [entry.strip() for entry in named.split(",")]
    usable = [entry for entry in entries if entry and entry != "-1"]
    return min(len(usable), present)


def chosen_device(asked: Device, gpus: int, ranks: int, *, demands_cuda: bool) -> Device:
    """Return what the ranks run on: real GPUs where there is one for each, else what serves the script.

    Raises UsageError when real GPUs were asked for and are too few.
    """
    if asked == "cuda" and gpus < ranks:
        raise UsageError(
            f"`--device cuda` needs a GPU for each of the {ranks} ranks; this machine has {gpus}",
            "`--device stand-in` emulates CUDA on the CPU.",
        )
    if asked != "auto":
        return asked
    if gpus >= ranks:
        return "cuda"
    return "stand-in" if demands_cuda else "cpu"


def _present_gpus() -> int:
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no library, no driver, no permission: all mean that there is no GPU to use
        return 0
