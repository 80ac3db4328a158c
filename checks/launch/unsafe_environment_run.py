"""Variables of the environment that do a job harm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from ddpdoctor.diagnosis.wording import site_location
from ddpdoctor.finding import Location
from ddpdoctor.record.model import RunRecord

_SEGFAULTING_TORCH = ("2.13.",)
_OFF = frozenset({"0", "false", "off", "no", "n", ""})
_READ_AT_IMPORT = frozenset({"TORCH_DISTRIBUTED_DEBUG"})
"""Setting them once torch is imported changes nothing."""
_LEFTOVERS = {
    "NCCL_P2P_DISABLE": "it disables direct traffic between the GPUs of a node",
    "NCCL_SHM_DISABLE": "it disables shared memory between the ranks of a node",
    "CUDA_LAUNCH_BLOCKING": "it serialises kernels and hides races between streams",
}


class UnsafeVariable(msgspec.Struct, frozen=True, kw_only=True):
    """A variable and what it does."""

    name: str
    value: str
    effect: str
    """A clause with a subject."""
    location: Location | None = None
    """The line that sets it; None when no line of the script is known to."""
    inherited: bool = True
    """The job was started with it."""


def unsafe_variables(record: RunRecord) -> Iterator[UnsafeVariable]:
    """Yield the variables, set from outside or by the script, that harm a job with this backend and torch."""
    values = dict(record.job.environment)
    places: dict[str, Location | None] = {}
    for setting in record.settings:
        if setting.imported and setting.name in _READ_AT_IMPORT:
            continue
        if setting.removed:
            values.pop(setting.name, None)
            continue
        values[setting.name] = setting.value
        places[setting.name] = site_location(record.site(setting.site))
    backends = " ".join(
        [record.job.backend, *(group.backend for group in record.groups), *(wait.backend for wait in record.waits)]
    )
    for name, effect in _effects(record, values, backends):
        yield UnsafeVariable(
            name=name,
            value=values.get(name) or _elsewhere(record, name),
            effect=effect,
            location=places.get(name),
            inherited=name not in places,
        )


def _elsewhere(record: RunRecord, name: str) -> str:
    """Return the value of a variable that only other machines of the job have."""
    return next((node.environment[name] for node in record.nodes if name in node.environment), "")


def _machines(record: RunRecord, name: str, value: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield the machines that ranks run on, the variable's value there, and the network interfaces there."""
    if not record.nodes:
        yield "this machine", value, record.job.interfaces
    for node in record.nodes:
        outside = node.environment.get(name, value)
        host = node.host if len(record.nodes) > 1 else "this machine"
        yield host, value if value != record.job.environment.get(name, "") else outside, node.interfaces


def _effects(record: RunRecord, values: Mapping[str, str], backends: str) -> Iterator[tuple[str, str]]:
    nccl = "nccl" in backends
    detail = values.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
    if detail and "gloo" in backends and record.job.torch_version.startswith(_SEGFAULTING_TORCH):
        yield "TORCH_DISTRIBUTED_DEBUG", "with it, constructing DDP on gloo crashes (torch 2.13)"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if name[:4].lower() not in backends:
            continue
        for host, own, interfaces in _machines(record, name, values.get(name, "")):
            if not _is_there(own, interfaces):
                yield name, f"{host} has no such network interface (it has {', '.join(interfaces)})"
                break
    if not nccl:
        return
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


def _is_there(wanted: str, interfaces: tuple[str, ...]) -> bool:
    """Return whether a list of interface names fits this machine; ``=`` asks for whole names, ``^`` excludes."""
    if not wanted or not interfaces or wanted.startswith("^"):
        return True
    names = [name.strip().partition(":")[0] for name in wanted.removeprefix("=").split(",")]
    exact = wanted.startswith("=")
    return any(there == name if exact else there.startswith(name) for name in names for there in interfaces)
