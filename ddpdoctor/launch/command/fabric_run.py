"""Reads the command line of Lightning's ``fabric run``, which lets torch's launcher start the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ddpdoctor.errors import UsageError
from ddpdoctor.launch.command.launcher_options import Parsed, names

NAME = "fabric run"
_VALUED = names(
    "--accelerator --strategy --devices --num-nodes --node-rank --main-address --main-port --precision"
)  # fmt: skip
_TOLD = ("accelerator", "strategy", "precision")
"""Options that a Fabric object reads from the environment; the ranks are as many as a rehearsal starts."""


class FabricRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a ``fabric run`` starts."""

    parsed: Parsed
    ranks: int | None
    """Of the whole job; None when there are as many as devices."""
    nodes: int
    environment: Mapping[str, str]
    """What its processes read of it."""


def parse_fabric(words: Sequence[str]) -> FabricRun:
    """Take apart what follows ``fabric run``; ``fabric run model`` is what it was called before Lightning 2.4.

    Its options may stand behind the script, too, and what it does not know belongs to the script. Raises UsageError
    for a wrong command line, and when the job is no DistributedDataParallel job.
    """
    options: dict[str, str] = {}
    rest: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            rest += left
            break
        written, equals, value = word.partition("=")
        name = written.replace("_", "-")
        if name not in _VALUED:
            rest.append(word)
        elif not equals and not left:
            raise UsageError(f"{NAME}: {written} needs a value")
        else:
            options[name] = value if equals else left.pop(0)
    if rest[:1] == ["model"]:
        rest.pop(0)
    if not rest or rest[0].startswith("-"):
        raise UsageError(f"{NAME} has no script", f"Write it as you launch it: `{NAME} train.py --devices 2`.")
    strategy = options.get("--strategy", "auto").lower()
    if not strategy.startswith(("ddp", "auto")):
        raise UsageError(
            f"{NAME} starts a job with the strategy {strategy}: only DDP jobs are examined",
            "`--static` with the script alone still reads its source.",
        )
    parsed = Parsed(options=options, rest=tuple(rest))
    nodes = parsed.count("--num-nodes", NAME) or 1
    per_node = _devices(options.get("--devices", "1"))
    told = {f"LT_{name.upper()}": options[f"--{name}"] for name in _TOLD if f"--{name}" in options}
    return FabricRun(
        parsed=parsed,
        ranks=per_node * nodes if per_node else None,
        nodes=nodes,
        environment={"LT_CLI_USED": "1", **told},
    )


def _devices(text: str) -> int | None:
    """Return how many devices a number or a list of them names; None for as many as there are."""
    listed = [entry for entry in text.strip("[]").split(",") if entry.strip()]
    if len(listed) > 1:
        return len(listed)
    if text in ("auto", "-1"):
        return None
    if text.isdigit() and int(text) > 0:
        return int(text)
    return 1
