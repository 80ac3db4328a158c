"""What is said of a GPU against nvidia-smi, against a load of a known duty cycle, and against the ranks' PIDs."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from ddpdoctor.monitor.gpus import GpuSampler, pcie_bytes_per_s
from ddpdoctor.monitor.snapshot import Snapshot
from ddpdoctor.record.streams.measured import Gpu, GpuSample, reasons_in_words
from tests.gpu.machine import HEALTHY, build_library, machine
from tests.on_gpu.claims import Bench, Claim
from tests.on_gpu.runs import Job, Ran

LIMIT_S = 240.0
SHARES = (0.1, 0.5, 0.9)
LOOKS = 7
MIB = 1 << 20
_SMI = "as nvidia-smi says"
CLAIMS = {
    "identity": Claim("UUID, name and memory of each GPU", _SMI, pretends=True),
    "limits": Claim("power limit, default limit and highest clock", _SMI, pretends=True),
    "links": Claim("what PCIe and NVLink carry", _SMI, pretends=True),
    "memory": Claim("memory in use under load, MiB", _SMI, pretends=True),
    "power": Claim("power under load, W", _SMI, pretends=True),
    "clock": Claim("clock under load, MHz", _SMI, pretends=True),
    "heat": Claim("temperature under load, °C", _SMI, pretends=True),
    "reasons": Claim("reasons for lower clocks under load", _SMI, pretends=True),
    "ecc": Claim("uncorrected ECC errors", _SMI, pretends=True),
    "mig": Claim("a GPU that MIG does not divide stands for itself", _SMI, pretends=True),
    **{
        f"duty{share}": Claim(f"utilisation of a GPU that is busy for {share:.0%} of the time, %", "within 5 points",
                              pretends=share == 0.5)
        for share in SHARES
    },
    "pids": Claim("the driver's processes are the ranks", "both PIDs", pretends=True),
    "ranks": Claim("each GPU is given the ranks that use it", "by their PIDs", pretends=True),
    "namespace": Claim("so it is in a container's PID namespace", "both ranks on the GPU"),
}  # fmt: skip
_FIELDS = {
    "uuid": "GPU-aaaa", "name": HEALTHY["gpu.name"], "memory.total": "81920", "memory.used": "40960",
    "enforced.power.limit": "700.00", "power.default_limit": "700.00", "clocks.max.sm": "1980",
    "pcie.link.gen.max": "5", "pcie.link.width.max": "16", "power.draw": "512.50", "clocks.sm": "1980",
    "temperature.gpu": "61", "clocks_event_reasons.active": "0x0000000000000000",
    "ecc.errors.uncorrected.volatile.total": "0", "mig.mode.current": "Disabled",
}  # fmt: skip
"""Fields of nvidia-smi, and what it would say of the invented GPU."""


def measure(bench: Bench) -> None:
    """Judge the claims."""
    if bench.pretends:
        library = build_library(bench.folder)
        with machine(library, bench.folder, HEALTHY) as asked:
            _against_smi(bench, lambda: asked.sampled().gpus)
        _pretended_ranks(bench, library)
        return
    load = Job(bench.folder / "load", "duty", 0.9, 25, watched=False)
    with sampling() as gpus:
        deadline_s = time.monotonic() + 60
        while (gpus()[0].samples[-1].utilisation_percent or 0) < 50 and time.monotonic() < deadline_s:
            time.sleep(0.2)
        time.sleep(3)  # Clocks, power and memory settle.
        _against_smi(bench, gpus)
    load.ended().truth()
    for share in SHARES:
        ran = Job(bench.folder / f"duty-{share}", "duty", share, 15).ended()
        bench.near(f"duty{share}", ran.truth()["busy_percent"], utilisation(ran), plus=5)
    ran = Job(bench.folder / "ranks", "duty", 0.2, 12, nproc=2).ended()
    told = {int(ran.truth(rank)["pid"]) for rank in (0, 1)}
    seen = {pid for snapshot in ran.snapshots() for sample in _samples(snapshot) for pid, _ in sample.processes}
    bench.judge("pids", told <= seen, f"{len(told & seen)} of 2", note=f"the driver names {sorted(seen)}")
    bench.same("ranks", _expected_ranks(ran), ranks_of(ran))
    prefix = ["unshare", *(["--user", "--map-root-user"] if os.getuid() else []), "--pid", "--fork", "--mount-proc"]
    try:
        subprocess.run([*prefix, "true"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        bench.leave_out("namespace", f"no PID namespace can be made here: {error}")
        return
    ran = Job(bench.folder / "namespace", "duty", 0.2, 12, nproc=2, prefix=prefix).ended()
    ran.truth(1)
    bench.same("namespace", _expected_ranks(ran), ranks_of(ran))


@contextmanager
def sampling() -> Iterator[Callable[[], tuple[Gpu, ...]]]:
    """Sample the GPUs of this machine; RuntimeError where none is seen."""
    sampler = GpuSampler(sample_every_s=0.2)
    sampler.start()
    try:
        deadline_s = time.monotonic() + 30
        while not (sampler.gpus() and all(gpu.samples for gpu in sampler.gpus())):
            if time.monotonic() > deadline_s:
                raise RuntimeError(sampler.note() or "the driver has shown no GPU for 30 s")
            time.sleep(0.05)
        yield sampler.gpus
    finally:
        sampler.close()


def smi(fields: Sequence[str]) -> dict[str, str]:
    """Return what nvidia-smi says of the first GPU; each field that it does not know is left out."""
    command = ["nvidia-smi", "--id=0", "--format=csv,noheader,nounits", f"--query-gpu={','.join(fields)}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 0:
        values = [value.strip() for value in done.stdout.strip().split(",")]
        return dict(zip(fields, values, strict=True))
    if len(fields) == 1:
        return {}
    # It refuses all fields for one that it does not know.
    return {name: value for field in fields for name, value in smi([field]).items()}


def number(text: str | None) -> float | None:
    """Return a figure of nvidia-smi; None for ``[N/A]`` and its like."""
    return float(text) if text is not None and re.fullmatch(r"-?\d+(\.\d+)?", text) else None


def utilisation(ran: Ran) -> float | None:
    """Return the utilisation that was shown last of a watched job, without what only spins."""
    return ran.snapshots()[-1].gpu_utilisation_corrected_percent


def ranks_of(ran: Ran) -> tuple[tuple[int, ...], ...]:
    """Return by GPU the ranks that were shown on it in the middle of a watched job."""
    trained = [snapshot for snapshot in ran.snapshots() if snapshot.steps]
    return tuple(gpu.ranks for gpu in trained[len(trained) // 2].gpus) if trained else ()


def _expected_ranks(ran: Ran) -> tuple[tuple[int, ...], ...]:
    count = len(ran.snapshots()[-1].gpus) or 1
    return tuple(tuple(rank for rank in (0, 1) if rank % count == place) for place in range(count))


def _samples(snapshot: Snapshot) -> Iterator[GpuSample]:
    for gpu in snapshot.gpus:
        yield from gpu.samples


def _against_smi(bench: Bench, gpus: Callable[[], tuple[Gpu, ...]]) -> None:
    said: list[dict[str, str]] = []
    samples: list[GpuSample] = []
    for _ in range(1 if bench.pretends else LOOKS):
        said.append(_FIELDS if bench.pretends else smi(tuple(_FIELDS)))
        samples.append(gpus()[0].samples[-1])
    gpu, first = gpus()[0], said[0]
    total = number(first.get("memory.total"))
    bench.same(
        "identity",
        (first.get("uuid"), first.get("name"), total),
        (gpu.uuid, gpu.name, None if gpu.memory_total_bytes is None else gpu.memory_total_bytes // MIB),
    )
    limits = tuple(number(first.get(name)) for name in ("enforced.power.limit", "power.default_limit", "clocks.max.sm"))
    bench.same("limits", limits, (gpu.power_limit_w, gpu.default_power_limit_w, gpu.maximum_sm_clock_mhz))
    generation, width = (number(first.get(f"pcie.link.{name}.max")) for name in ("gen", "width"))
    pcie = pcie_bytes_per_s(int(generation or 0), int(width or 0))
    nvlink = 18 * 26.562e9 if bench.pretends else _nvlink_of_smi()
    bench.same("links", _gigabytes(pcie, nvlink), _gigabytes(gpu.pcie_bytes_per_s, gpu.nvlink_bytes_per_s))

    def typical(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return median(known) if known else None

    under_load: tuple[tuple[str, str, Sequence[float | None], float, float], ...] = (
        ("memory", "memory.used", [(s.memory_used_bytes or 0) / MIB for s in samples], 0.02, 64.0),
        ("power", "power.draw", [s.power_w for s in samples], 0.1, 0.0),
        ("clock", "clocks.sm", [s.sm_clock_mhz for s in samples], 0.05, 0.0),
        ("heat", "temperature.gpu", [s.temperature_c for s in samples], 0.0, 3.0),
    )
    for key, field, ours, share, plus in under_load:
        bench.near(key, typical([number(one.get(field)) for one in said]), typical(ours), share=share, plus=plus)
    words = {reasons_in_words(_bits(one.get("clocks_event_reasons.active", ""))) for one in said}
    ours_words = {sample.throttle_reasons for sample in samples}
    bench.judge("reasons", bool(words & ours_words), sorted(ours_words), expected=f"one of {sorted(words)}")
    bench.same("ecc", number(first.get("ecc.errors.uncorrected.volatile.total")), samples[0].ecc_errors)
    divided = first.get("mig.mode.current") == "Enabled"
    bench.judge("mig", divided == gpu.uuid.startswith("MIG-"), gpu.uuid, note=f"MIG {first.get('mig.mode.current')}")


def _bits(text: str) -> int:
    return int(text, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", text) else 0


def _nvlink_of_smi() -> float | None:
    done = subprocess.run(("nvidia-smi", "nvlink", "-s", "-i", "0"), capture_output=True, text=True, timeout=60)
    speeds = re.findall(r"Link \d+: ([\d.]+) GB/s", done.stdout)
    return 1e9 * sum(map(float, speeds)) if speeds else None


def _gigabytes(*values: float | None) -> tuple[float | None, ...]:
    return tuple(None if value is None else round(value / 1e9) for value in values)


def _pretended_ranks(bench: Bench, library: Path) -> None:
    """Two ranks on the CPU, each of which the invented driver sees on the GPU that is not its own by its number."""
    state = bench.folder / "state-of-ranks"
    values = HEALTHY | {"gpu.utilisation": "50"}
    state.write_text("".join(f"{name} {value}\n" for name, value in values.items()))
    environment = {"LD_LIBRARY_PATH": str(library), "FAKE_NVML": str(state)}
    job = Job(bench.folder / "ranks", "duty", 0.5, 9, nproc=2, variables=environment)
    deadline_s = time.monotonic() + 90
    pids: list[int] = []
    while len(pids) < 2 and time.monotonic() < deadline_s and job.process.poll() is None:
        time.sleep(0.1)
        pids = sorted(int(path.stem.partition("-")[2]) for path in (job.folder / "run").glob("steps-*.ring"))
    draft = state.with_suffix(".draft")
    on_gpus = {f"gpu{place}.process": f"{pid} 1000000" for place, pid in enumerate(reversed(pids))}
    draft.write_text("".join(f"{name} {value}\n" for name, value in (values | on_gpus).items()))
    draft.replace(state)
    ran = job.ended()
    told = [int(ran.truth(rank)["pid"]) for rank in (0, 1)]
    seen = {pid for snapshot in ran.snapshots() for sample in _samples(snapshot) for pid, _ in sample.processes}
    bench.judge("pids", set(told) <= seen, f"{len(set(told) & seen)} of 2")
    bench.same("ranks", tuple((told.index(pid),) for pid in reversed(pids)), ranks_of(ran))
    bench.near("duty0.5", 50, utilisation(ran), plus=5)
