"""How many GPUs this machine offers to a job, and what the ranks of a rehearsal run on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

from ddpdoctor.errors import UsageError

# Layouts of a job over nodes, which a rehearsal pretends on one machine.

_SHAPE = re.compile(r"(\d{1,3})x(\d{1,3})")
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
