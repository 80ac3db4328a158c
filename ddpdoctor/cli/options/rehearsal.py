"""Options that say how a script is rehearsed and judged, which ``check`` and ``gate`` have in common."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from ddpdoctor.errors import UsageError
from ddpdoctor.finding import Severity
from ddpdoctor.launch.request import DEVICES, FEWEST_RANKS, MOST_RANKS, parse_layout

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
MOST_SAMPLES = 1_000_000_000
"""Of a batch, and batches of a pass."""


def rehearsal_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add how many ranks, batches and samples, on what, and with what held back.

    The command takes them as one mapping, ``how``: fields of ``ExamineRequest``.
    """

    @functools.wraps(function)
    def gathered(*arguments: Any, **given: Any) -> Any:
        how = {name: given.pop(name) for name in names}
        source = click.get_current_context().get_parameter_source("nproc")
        if how["layout"] is not None and source is ParameterSource.COMMANDLINE:
            raise UsageError("either `--layout` or `--nproc`, not both: a layout sets the number of ranks")
        return function(*arguments, how=how, **given)

    others = len(getattr(gathered, "__click_params__", ()))
    _all(
        gathered,
        click.option(
            "--nproc",
            type=click.IntRange(min=FEWEST_RANKS, max=MOST_RANKS),
            default=2,
            show_default=True,
            metavar="N",
            help="Maximum number of ranks in the rehearsal.",
        ),
        click.option(
            "--layout",
            metavar="NODESxRANKS",
            callback=lambda ctx, parameter, value: None if value is None else parse_layout(value),
            help="Pretend NODESxRANKS, such as 2x1: two nodes with one rank each.",
        ),
        click.option(
            "--batches",
            type=click.IntRange(min=1, max=MOST_SAMPLES),
            default=4,
            show_default=True,
            metavar="N",
            help="Batches that a pass over a loader yields before it is cut short.",
        ),
        click.option(
            "--batch-size",
            default="auto",
            show_default=True,
            metavar="auto|keep|N",
            callback=lambda ctx, parameter, value: _samples(value),
            help=(
                "Number of samples to which batches are cut; by default 4 on the stand-in, where the CPU does the "
                "GPU's work."
            ),
        ),
        click.option(
            "--python", metavar="PATH", help="Python interpreter of the ranks; by default, one that has torch."
        ),
        click.option(
            "--device",
            type=click.Choice(DEVICES),
            default="auto",
            show_default=True,
            help="Device of the ranks; the stand-in emulates CUDA and NCCL on the CPU.",
        ),
        click.option(
            "--overlay/--no-overlay",
            default=True,
            help="Redirect the script's writes to an overlay that is discarded, where the kernel allows one; without "
            "it, the script writes to the real files and is stopped before it changes an existing one.  "
            "[default: overlay]",
        ),
        click.option(
            "--network/--no-network",
            default=None,
            help="Let the script reach the network and this machine's ports. By default it reaches neither where it "
            "runs in an overlay.  [default: no-network]",
        ),
        click.option(
            "--allow-socket",
            "sockets",
            multiple=True,
            metavar="PATH",
            callback=lambda ctx, parameter, value: tuple(map(_socket, value)),
            help="Let the script reach the program that listens on this Unix socket, such as a data server of the job.",
        ),
        click.option(
            "--pretend/--no-pretend",
            default=True,
            help=(
                "Replace torchvision data sets, image folders, pretrained weights and trackers that are missing on "
                "this machine by generated ones.  [default: pretend]"
            ),
        ),
        click.option("--allow-writes", is_flag=True, help="Allow the script to change existing files."),
    )
    names = [parameter.name for parameter in vars(gathered)["__click_params__"][others:]]
    return gathered


def judging_options(function: Decorated) -> Decorated:
    """Return which checks count, and from which severity on."""
    return _all(
        function,
        click.option(
            "--select",
            multiple=True,
            metavar="CHECKS",
            help="Run only these checks: codes, code prefixes, or names.",
        ),
        click.option("--ignore", multiple=True, metavar="CHECKS", help="Do not run these checks."),
        click.option(
            "--fail-on",
            type=click.Choice([severity.value for severity in Severity]),
            help="The lowest severity that sets exit code 1.  [default: warning]",
        ),
    )


def _socket(path: str) -> Path:
    """Return the absolute path of a Unix socket; raises UsageError where there is none."""
    found = Path(path).absolute()
    if not found.is_socket():
        raise UsageError(f"--allow-socket {path}: no socket is there", "Start the program that listens on it first.")
    return found


def words(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of options that take several, separated by commas or given again."""
    return tuple(word.strip() for value in values for word in value.split(",") if word.strip())


def _all(function: Decorated, *options: Callable[[Decorated], Decorated]) -> Decorated:
    for option in reversed(options):
        function = option(function)
    return function


def _samples(value: str) -> int | None:
    """Return the size that batches are cut to; 0 to keep them as they are, None to let the device decide."""
    if value in ("auto", "keep"):
        return None if value == "auto" else 0
    if not re.fullmatch("[0-9]{1,10}", value) or not 1 <= int(value) <= MOST_SAMPLES:
        problem = f"{value} is not `auto`, `keep` or a number of samples up to {MOST_SAMPLES:,}"
        raise click.BadParameter(problem, param_hint="'--batch-size'")
    return int(value)
