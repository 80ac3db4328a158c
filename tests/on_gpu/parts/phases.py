"""The times of the phases against torch's profiler on the same steps, and the lines that read back from the GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from ddpdoctor.diagnosis.performance.summarise import summarise
from ddpdoctor.record.streams.measured import StepTrack
from tests.on_gpu.claims import Bench, Claim
from tests.on_gpu.runs import JOBS, Job, Ran, codes_of

LIMIT_S = 180.0
CLAIMS = {
    **{
        name: Claim(f"{name}: the probe's time of a step is the profiler's", "within 10%", pretends=True)
        for name in ("forward", "backward", "optimizer")
    },
    "ahead": Claim("the CPU runs ahead: a forward returns long before the GPU has done it", "under half of its time"),
    "shares": Claim("the report gives forward and backward the GPU's shares", "within 10% of the profiler's ratio"),
    "exposed": Claim("exposed communication of gloo is what lies between the last gradient and the end of backward",
                     "within 10% or 1 ms", pretends=True),
    "reads": Claim("host syncs are found with their line", "20 of 20 lines, and no other", pretends=True),
    "told": Claim("the report names the lines that read in every step", "DDP406"),
}  # fmt: skip
PHASES = ("forward", "backward", "optimizer")
FIRST, STEPS = 38, 64
_RUNTIME = frozenset({"cuda_runtime", "cuda_driver"})
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


def measure(bench: Bench) -> None:
    """Judge the claims."""
    # One job at a time: on one GPU the times of one would be those of both.
    _exposed(bench, Job(bench.folder / "exposed", "exposed", 20 if bench.pretends else 60, nproc=2).ended())
    _reads(bench, Job(bench.folder / "reads", "reads", 45).ended())
    _phases(bench, Job(bench.folder / "phases", "phases", STEPS, FIRST).ended())


def _phases(bench: Bench, ran: Ran) -> None:
    ran.truth()
    record = ran.record()
    (track,) = record.step_tracks
    trace = json.loads((ran.folder / "truth.trace.json").read_text(encoding="utf-8"))["traceEvents"]
    on_gpu = not bench.pretends
    rows = [row for row in range(len(track)) if track.step[row] >= FIRST + 2]
    if on_gpu:
        rows = [row for row in rows if track.device_backward_ns[row] >= 0]
    if not rows:
        raise RuntimeError(f"none of the steps from {FIRST} on was measured on the GPU")
    steps = [track.step[row] for row in rows]
    truth = {phase: mean(phase_ms(trace, step, phase, on_gpu=on_gpu) for step in steps) for phase in PHASES}
    found = {phase: mean(column(track, phase, on_gpu=on_gpu)[row] / 1e6 for row in rows) for phase in PHASES}
    for phase in PHASES:
        bench.near(phase, truth[phase], found[phase], share=0.1, plus=0.0 if on_gpu else 0.5)
    if not on_gpu:
        return
    host_ms = mean(track.forward_ns[row] / 1e6 for row in rows)
    bench.judge("ahead", host_ms < 0.5 * truth["forward"], f"{host_ms:.2f} ms of {truth['forward']:.2f} ms")
    phases = summarise(record).phases
    backward_ns = 0.0
    if phases is not None:
        backward_ns = phases.backward_compute_ns + (phases.exposed_waiting_ns or 0) + (phases.exposed_transfer_ns or 0)
    ratio = phases.forward_ns / backward_ns if phases is not None and phases.forward_ns and backward_ns else None
    bench.near("shares", truth["forward"] / truth["backward"], ratio, share=0.1)


def _exposed(bench: Bench, ran: Ran) -> None:
    truth = ran.truth()["exposed_ms"]
    (track,) = [track for track in ran.record().step_tracks if track.rank == 0]
    rows = [row for row in range(len(track)) if track.exposed_ns[row] >= 0 and 3 < track.step[row] <= len(truth)]
    true_ms = median(truth[track.step[row] - 1] for row in rows) if rows else None
    found_ms = median(track.exposed_ns[row] / 1e6 for row in rows) if rows else None
    bench.near("exposed", true_ms, found_ms, share=0.1, plus=1.0 if not bench.pretends else 15.0)


def _reads(bench: Bench, ran: Ran) -> None:
    ran.truth()
    source = (JOBS / "reads.py").read_text(encoding="utf-8").splitlines()
    expected = {number for number, line in enumerate(source, 1) if "  # read" in line}
    record = ran.record()
    frames = [record.site(read.site).innermost for read in record.host_reads]
    found = {frame.line for frame in frames if frame is not None and Path(frame.file).name == "reads.py"}
    missed, others = sorted(expected - found), sorted(found - expected)
    bench.judge(
        "reads",
        not missed and not others and len(expected) == 20,
        f"{len(found & expected)} of {len(expected)}",
        note=f"missed lines {missed}, others {others}" if missed or others else "",
    )
    if not bench.pretends:
        codes = codes_of(ran.report)
        bench.judge("told", "DDP406" in codes, ", ".join(codes) or "no finding")


def column(track: StepTrack, phase: str, *, on_gpu: bool) -> Sequence[int]:
    """Return what the probe has measured of a phase."""
    values: Sequence[int] = getattr(track, f"device_{phase}_ns" if on_gpu else f"{phase}_ns")
    return values


def phase_ms(trace: Sequence[Mapping[str, Any]], step: int, phase: str, *, on_gpu: bool) -> float:
    """Return what the profiler saw of a phase: on a GPU from the end of what was launched before it, or from its own
    beginning where the GPU had nothing left to do, to the end of the last that was launched in it.
    """
    spans = [event for event in trace if event.get("ph") == "X"]
    mark = next(e for e in spans if e["name"] == f"step {step} {phase}" and e.get("cat") == "user_annotation")
    if not on_gpu:
        return float(mark["dur"]) / 1e3
    begins_us, ends_us = float(mark["ts"]), float(mark["ts"]) + float(mark["dur"])
    launched_us = {
        event["args"]["correlation"]: float(event["ts"])
        for event in spans
        if event.get("cat") in _RUNTIME and "correlation" in event.get("args", {})
    }
    before = [begins_us]
    inside: list[float] = []
    for event in spans:
        if event.get("cat") in _ON_DEVICE and (at_us := launched_us.get(event["args"].get("correlation"))) is not None:
            end_us = float(event["ts"]) + float(event["dur"])
            if at_us < begins_us:
                before.append(end_us)
            elif at_us <= ends_us:
                inside.append(end_us)
    return (max(inside, default=begins_us) - max(before)) / 1e3
