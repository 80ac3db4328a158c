"""An environment variable harms the job.

What it finds
    Debug settings that crash or slow the job (TORCH_DISTRIBUTED_DEBUG=DETAIL with gloo on torch 2.13,
    TORCH_NCCL_ENABLE_TIMING, CUDA_LAUNCH_BLOCKING, NCCL_P2P_DISABLE), NCCL's error handling switched off or combined
    with blocking waits, and a network interface that this machine does not have. Set outside or by the script. In the
    source: those that a script sets whatever its options are, and where they still count (TORCH_DISTRIBUTED_DEBUG is
    read when torch is imported), also DETAIL, with which torch compares each collective among the ranks.

Why it is bad
    Such variables outlive the debugging session that they were set for, in a shell profile or a job template. Nothing
    in the script shows them, and the job is slow, hangs where it should fail, or crashes before its first step.

Example
    export TORCH_NCCL_ASYNC_ERROR_HANDLING=0

Remedy
    Remove the variable from the job's environment.

When it is wrong
    If it was set on purpose for this run. NCCL's variables are checked only if a group uses NCCL.

References
    https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from ddpdoctor.check import Check, Script
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import NONE, constant
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.job_kind import initialisations, is_distributed, starts
from ddpdoctor.source.torch_model.recorded_calls import SET_DEFAULT, SET_VARIABLE

CHECK = Check(
    code="DDP509",
    name="unsafe-environment",
    severity={"source": Severity.ADVICE, "rehearsal": Severity.WARNING, "run": Severity.WARNING},
    needs=frozenset({"ranks", "settings"}),
    subjects=("job",),
    triggers=("TORCH_DISTRIBUTED_DEBUG", "ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_TIMING", "CUDA_LAUNCH_BLOCKING"),
)

in_run = CHECK.judged_by("checks.launch.environment_run", "unsafe_variables")

OFF = frozenset({"0", "false", "off", "no", "n", ""})
"""Values of a variable that switch off what it names."""
READ_AT_IMPORT = frozenset({"TORCH_DISTRIBUTED_DEBUG"})
"""Setting them once torch is imported changes nothing."""
UNNOTICED = "with it, a failed collective goes unnoticed: the ranks hang instead of ending"
"""What error handling that is switched off does."""
TIMED = "it can keep communication from overlapping with backward"
"""What the timing of collectives does."""
SERIALISED = "it serialises kernels and hides races between streams"
"""What blocking launches do."""
# What variables do to a job that may use NCCL.
_EFFECTS = {
    "TORCH_NCCL_ENABLE_TIMING": TIMED,
    "CUDA_LAUNCH_BLOCKING": f"{SERIALISED}, which is for debugging",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": UNNOTICED,
    "NCCL_ASYNC_ERROR_HANDLING": UNNOTICED,
    "TORCH_DISTRIBUTED_DEBUG": "with it, the ranks compare each collective before it runs, which is for debugging",
}


def in_source(script: Script) -> Iterator[Finding]:
    """Report variables that the script sets whatever it is asked for, in a job that may use NCCL."""
    projection = whole_projection(script)
    joined = list(initialisations(projection))
    backends = {constant(event.argument("backend", 0) or NONE) for event in joined}
    if not is_distributed(projection) or backends == {"gloo"}:
        return
    for event in projection.events:
        if event.name not in (SET_VARIABLE, SET_DEFAULT) or event.conditions or event.guards or event.root:
            continue
        if len(event.positional) < 2:
            continue
        name, value = str(constant(event.positional[0])), constant(event.positional[1])
        if name in _EFFECTS and isinstance(value, str) and _harms(name, value) and _counts(projection, event, name):
            yield CHECK.finding(
                f"{name}={value}: {_EFFECTS[name]}",
                remedy="Remove the line that sets it.",
                locations=event.location,
            )


def _harms(name: str, value: str) -> bool:
    if name in READ_AT_IMPORT:
        return value.upper() == "DETAIL"
    return (value.lower() in OFF) == name.endswith("ASYNC_ERROR_HANDLING")


def _counts(projection: Projection, event: Event, name: str) -> bool:
    """Return whether a variable is set before it is read: ranks that are spawned import torch anew."""
    script = projection.machine.script
    if event.in_parent:
        words = script.entry.words
        read_again = name not in READ_AT_IMPORT or ("spawn" in words and "fork" not in words)
        return read_again and any(event.ordinal < start.ordinal for start in starts(projection))
    if name in READ_AT_IMPORT:
        line = event.location.line
        before = [one.module.partition(".")[0] for one in event.module.imports if one.line < line]
        return event.module is script.entry and not event.scopes[1:] and sys.stdlib_module_names >= set(before)
    return all(event.ordinal < one.ordinal for one in initialisations(projection))
