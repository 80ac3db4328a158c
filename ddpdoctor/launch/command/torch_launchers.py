"""Reads the command lines of torch's own launchers: ``torchrun`` and the older ``torch.distributed.launch``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpdoctor.errors import UsageError
from ddpdoctor.launch.command.launcher_options import Parsed, Syntax, names, parse_options

_VALUED = names(
    "--nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --max-restarts --monitor-interval"
    " --start-method --event-log-handler --role --log-dir --redirects --tee --local-ranks-filter --node-rank"
    " --duplicate-stdout-filters --duplicate-stderr-filters --log-line-prefix-template --master-addr --master-port"
    " --local-addr --logs-specs --numa-binding --signals-to-handle --shutdown-timeout"
)
_FLAGS = frozenset({"--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank", "--help"})
_SHORT = {"-m": "--module", "-r": "--redirects", "-t": "--tee", "-h": "--help"}
TORCHRUN = Syntax(name="torchrun", valued=_VALUED, flags=_FLAGS, short=_SHORT)
LAUNCH = Syntax(name="torch.distributed.launch", valued=_VALUED, flags=_FLAGS | {"--use-env"}, short=_SHORT)

AS_MANY_AS_DEVICES = frozenset({"auto", "gpu", "cpu", "xpu"})
_DEFAULTS = "PET_"
"""``PET_NPROC_PER_NODE`` in the environment is what ``--nproc-per-node`` is when it is not given."""


def parse_torch_launcher(words: Sequence[str], syntax: Syntax, environment: Mapping[str, str]) -> Parsed:
    """Take apart what follows the launcher's name; options come from the environment, too."""
    parsed = parse_options(words, syntax)
    for option in ("--nproc-per-node", "--nnodes"):
        value = environment.get(_DEFAULTS + option[2:].replace("-", "_").upper())
        if value is not None:
            parsed.options.setdefault(option, value)
    if "--module" in parsed.options and "--no-python" in parsed.options:
        raise UsageError(f"{syntax.name}: either --module or --no-python, not both")
    return parsed


def ranks_of_job(parsed: Parsed, name: str) -> int | None:
    """Ranks on all nodes together; None when they are as many as there are devices."""
    per_node = parsed.options.get("--nproc-per-node", "1")
    if per_node in AS_MANY_AS_DEVICES:
        return None
    count = parsed.count("--nproc-per-node", name) or 1
    return count * most_nodes(parsed, name)


def most_nodes(parsed: Parsed, name: str) -> int:
    """Return the upper end of ``--nnodes``, which is a number or a range."""
    text = parsed.options.get("--nnodes", "1")
    numbers = text.split(":")
    if len(numbers) > 2 or not all(number.isdigit() and int(number) for number in numbers):
        raise UsageError(f"{name}: --nnodes {text} is neither a number of nodes nor a range such as 1:4")
    return int(numbers[-1])
