"""The script is written for torch.distributed.launch, which torchrun has replaced.

What it finds
    A `--local_rank` argument that is required, or in a script that never reads LOCAL_RANK from the environment, or that
    a file of the project starts with torch.distributed.launch; an argument of that name with a number as default and
    no `type=int`; and imports of torch.distributed.launch itself.

Why it is bad
    torchrun passes the local rank in the environment and never on the command line: the argument keeps its default on
    every rank, so all of them use GPU 0 or behave as a single process; a required one ends every rank. Newer versions
    of the old launcher write the option as --local-rank, which a parser for --local_rank refuses. Without `type=int`
    the number arrives as text, and "0" is not 0.

Example
    parser.add_argument("--local_rank", type=int, default=0)

Remedy
    Read int(os.environ["LOCAL_RANK"]) and start the script with torchrun.

When it is wrong
    Where the job's own launcher passes the option, as DeepSpeed's does; scripts that import DeepSpeed are left out.

References
    https://docs.pytorch.org/docs/stable/elastic/run.html#transitioning-from-torch-distributed-launch-to-torchrun
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, RunRecord, Script
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.queries.rendezvous import legacy_launches

CHECK = Check(
    code="DDP503",
    name="deprecated-launcher",
    stands_for="local-rank-argument",
    severity={"source": Severity.WARNING, "rehearsal": Severity.ERROR, "log": Severity.ERROR},
    needs=frozenset({"ranks"}),
    triggers=("local_rank", "local-rank", "launch"),
)
_TITLES = {
    "argument": "the local rank is read from the command line only: under torchrun it keeps its default on every rank",
    "required": (
        "the local rank is a required argument, which torchrun does not pass: each rank ends with a usage error"
    ),
    "refused": (
        "torch.distributed.launch, by which the project starts this script, writes the option as --local-rank since "
        "torch 2.0: this parser refuses it, and each rank ends with a usage error"
    ),
    "refused later": (
        "torch.distributed.launch, by which the project starts this script, writes the option as --local-rank from "
        "torch 2.0 on, which this parser refuses"
    ),
    "text": "this argument has no type=int: a local rank from the command line arrives as text",
    "module": "torch.distributed.launch has been replaced by torchrun",
}
_REMEDIES = {
    "argument": 'Read int(os.environ["LOCAL_RANK"]), which torchrun and newer launchers set.',
    "required": 'Read int(os.environ["LOCAL_RANK"]), which torchrun and newer launchers set, and remove the argument.',
    **dict.fromkeys(
        ("refused", "refused later"),
        'Start it with torchrun and read int(os.environ["LOCAL_RANK"]); or add "--local-rank" to the names.',
    ),
    "text": 'Add type=int, or read int(os.environ["LOCAL_RANK"]).',
    "module": "Start the job with torchrun, or call torch.distributed.run.",
}


def in_source(script: Script) -> Iterator[Finding]:
    """Report what only the old launcher serves."""
    for location, form in legacy_launches(script):
        yield CHECK.finding(
            _TITLES[form],
            remedy=_REMEDIES[form],
            locations=location,
            severity=Severity.ADVICE if form == "refused later" else None,
        )


def in_run(record: RunRecord) -> Iterator[Finding]:
    """Report an argument of the launch command that the script does not know, and that was passed in its own words."""
    if record.job.option_passed:
        title = "torch.distributed.launch passes --local-rank, which this script does not take: its ranks end at once"
        yield CHECK.finding(
            title,
            basis=record.job.kind,
            remedy='Launch with torchrun and read int(os.environ["LOCAL_RANK"]); or let the script take --local-rank.',
            because=(
                f"the script takes {record.job.option_passed}, and was rehearsed with it; since torch 2.0 the "
                "launcher writes the option with a hyphen, which argparse refuses",
                None,
            ),
        )
