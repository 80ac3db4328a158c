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
from collections.abc import Iterator, Mapping

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

READ_AT_IMPORT = frozenset({"TORCH_DISTRIBUTED_DEBUG"})
"""Setting them once torch is imported changes nothing."""
_OFF = frozenset({"0", "false", "off", "no", "n", ""})
_LEFTOVERS = {
    "NCCL_P2P_DISABLE": "it disables direct traffic between the GPUs of a node",
    "NCCL_SHM_DISABLE": "it disables shared memory between the ranks of a node",
    "CUDA_LAUNCH_BLOCKING": "it serialises kernels and hides races between streams",
}


def effects_on_nccl(values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the variables that harm a job of NCCL's, and how."""
    if _is_on(values, "TORCH_NCCL_ENABLE_TIMING"):
        yield "TORCH_NCCL_ENABLE_TIMING", "it can keep communication from overlapping with backward"
    for prefix in ("TORCH_NCCL", "NCCL"):
        handling, blocking = f"{prefix}_ASYNC_ERROR_HANDLING", f"{prefix}_BLOCKING_WAIT"
        if handling in values and values[handling].lower() in _OFF:
            yield handling, "with it, a failed collective goes unnoticed: the ranks hang instead of ending"
        elif _is_on(values, blocking) and values.get(handling, "1").lower() not in _OFF:
            yield blocking, "it excludes error handling: it blocks the CPU in each collective"
    for name, effect in _LEFTOVERS.items():
        if _is_on(values, name):
            yield name, f"{effect}, which is for debugging"


def _is_on(values: Mapping[str, str], name: str) -> bool:
    return values.get(name, "").lower() not in _OFF


def in_source(script: Script) -> Iterator[Finding]:
    """Report variables that the script sets whatever it is asked for, in a job that may use NCCL."""
    projection = whole_projection(script)
    backends = {constant(one.argument("backend", 0) or NONE) for one in initialisations(projection)}
    if not is_distributed(projection) or backends == {"gloo"}:
        return
    for event in projection.events:
        if event.name in (SET_VARIABLE, SET_DEFAULT) and not (event.conditions or event.guards or event.root):
            name, value = [*(str(constant(one)) for one in event.positional), ""][:2]
            effects = dict(effects_on_nccl({name: value}))
            if value.upper() == "DETAIL":
                effects["TORCH_DISTRIBUTED_DEBUG"] = "with it, the ranks compare each collective before it runs"
            # A script that disables one way between the GPUs knows its machine.
            if name in effects and not name.endswith("_DISABLE") and _is_read(projection, event, name):
                yield CHECK.finding(
                    f"{name}={value}: {effects[name]}",
                    remedy="Remove the line that sets it.",
                    locations=event.location,
                )


def _is_read(projection: Projection, event: Event, name: str) -> bool:
    """Return whether a variable is set before it is read: ranks that are spawned import torch anew."""
    entry = projection.machine.script.entry
    if name not in READ_AT_IMPORT:
        readers = starts(projection) if event.in_parent else initialisations(projection)
        return all(event.ordinal < one.ordinal for one in readers)
    if event.in_parent:
        return "spawn" in entry.words and "fork" not in entry.words
    before = {one.module.partition(".")[0] for one in entry.imports if one.line < event.location.line}
    return event.module is entry and not event.scopes[1:] and before <= sys.stdlib_module_names
