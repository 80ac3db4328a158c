"""Options that say how a script is rehearsed and judged, which ``check`` and ``gate`` have in common."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from ddpdoctor.errors import UsageError
from ddpdoctor.finding import Severity
from ddpdoctor.launch.devices import DEVICES
from ddpdoctor.launch.layouts import FEWEST_RANKS, MOST_RANKS, parse_layout

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
            raise UsageError("either `--layout` or `--nproc`, not both: a layout says how many ranks there are")
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
            help="Ranks of the rehearsal at most.",
        ),
        click.option(
            "--layout",
            metavar="NODESxRANKS",
            callback=lambda ctx, parameter, value: None if value is None else parse_layout(value),
            help="Pretend several nodes with so many ranks each, such as 2x1.",
        ),
        click.option(
            "--batches",
            type=click.IntRange(min=1, max=MOST_SAMPLES),
            default=4,
            show_default=True,
            metavar="N",
            help="Batches that a pass over a loader yields before it is cut.",
        ),
        click.option(
            "--batch-size",
            default="auto",
            show_default=True,
            metavar="auto|keep|N",
            callback=lambda ctx, parameter, value: _samples(value),
            help="Samples that a loader's batches are cut to; by default 4 on the stand-in, where a CPU does a GPU's"
            " work.",
        ),
        click.option(
            "--python", metavar="PATH", help="Interpreter of the ranks; by default one that has torch is looked for."
        ),
        click.option(
            "--device",
            type=click.Choice(DEVICES),
            default="auto",
            show_default=True,
            help="What the ranks run on; the stand-in serves CUDA and NCCL from the CPU.",
        ),
        click.option(
            "--overlay/--no-overlay",
            default=True,
            help="Let the script write to an overlay that is thrown away, where the kernel allows one; without it, it"
            " writes to the real files, and is stopped where it would change one that was there before."
            "  [default: overlay]",
        ),
        click.option(
            "--network/--no-network", default=True, help="Keep the script from the network, but for the loopback."
        ),
        click.option(
            "--pretend/--no-pretend",
            default=True,
            help="Serve data sets of torchvision, folders of images, pretrained weights and trackers that are not on"
            " this machine as generated ones.  [default: pretend]",
        ),
        click.option(
            "--allow-writes", is_flag=True, help="Let the script change files that were there before, for real."
        ),
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
            help="Run these checks only: codes, prefixes of codes, or names.",
        ),
        click.option("--ignore", multiple=True, metavar="CHECKS", help="Do not run these checks."),
        click.option(
            "--fail-on",
            type=click.Choice([severity.value for severity in Severity]),
            help="The mildest severity that makes the exit code 1.  [default: warning]",
        ),
    )


def words(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of options that take several, separated by commas or given again."""
    return tuple(word.strip() for value in values for word in value.split(",") if word.strip())


def _all(function: Decorated, *options: Callable[[Decorated], Decorated]) -> Decorated:
    for option in reversed(options):
        function = option(function)
    return function


def _samples(value: str) -> int | None:
    """The size that batches are cut to; 0 to keep them as they are, None to let the device decide."""
    if value in ("auto", "keep"):
        return None if value == "auto" else 0
    if not re.fullmatch("[0-9]{1,10}", value) or not 1 <= int(value) <= MOST_SAMPLES:
        problem = f"{value} is neither `auto` nor `keep` nor a number of samples up to {MOST_SAMPLES:,}"
        raise click.BadParameter(problem, param_hint="'--batch-size'")
    return int(value)
