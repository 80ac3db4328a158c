"""The scripts with hard-coded CUDA on the stand-in and on the GPU: what their modules work on, and what is found."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.check_command import check
from tests.on_gpu.claims import Bench, Claim
from tests.on_gpu.runs import JOBS, Job
from tests.stand_in.table import CUDA_SCRIPTS, CudaScript

LIMIT_S = 255.0
TOGETHER = 5
PRETENDED = ("diffusion",)
"""One of the shortest, with autocast and an average of the weights."""
CLAIMS = {
    "stand_in": Claim("the scripts train to their end on the stand-in", "all of them", pretends=True),
    "cuda": Claim("the scripts train to their end on the GPU, by NCCL", "all of them"),
    "types": Claim("modules and optimizers work on the same types on both; bfloat16 stands for float16 under autocast",
                   "no difference"),
    "devices": Claim("what a module or an optimizer works on is on the GPU", "nothing on the CPU"),
    "noted": Claim("what modules and optimizers work on is noted on the stand-in", "in every script", pretends=True),
    "findings": Claim("`check` finds the same on the stand-in and on GPUs", "no difference"),
}  # fmt: skip
_SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_NODELIST": "localhost",
          "SLURM_JOB_NODELIST": "localhost", "SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_ID": "1"}  # fmt: skip
_ARGUMENTS = {"detection_engine": ("--num-gpus", "1")}
"""Of what spawns as many ranks as it is told."""
Trace = Mapping[tuple[str, str], frozenset[tuple[str, str]]]
"""By kind and name the types, and the devices, that were seen."""


def measure(bench: Bench) -> None:
    """Judge the claims."""
    import torch  # Not for those who only ask what is claimed: it takes seconds.

    scripts = [script for script in CUDA_SCRIPTS if not bench.pretends or script.name in PRETENDED]
    with ThreadPoolExecutor(1 if bench.pretends else TOGETHER) as pool:
        served = list(pool.map(lambda script: _traced(bench, script, stand_in=True), scripts))
        failed = [f"{script.name}: {why}" for script, (_, why) in zip(scripts, served, strict=True) if why]
        bench.judge("stand_in", not failed, f"{len(scripts) - len(failed)} of {len(scripts)}", note="; ".join(failed))
        kinds = [{kind for kind, _ in trace} for trace, _ in served]
        bench.judge("noted", all(kind == {"forward", "step"} for kind in kinds), f"{sum(map(len, kinds))} kinds")
        if bench.pretends:
            return
        real = list(pool.map(lambda script: _traced(bench, script, stand_in=False), scripts))
    failed = [f"{script.name}: {why}" for script, (_, why) in zip(scripts, real, strict=True) if why]
    bench.judge("cuda", not failed, f"{len(scripts) - len(failed)} of {len(scripts)}", note="; ".join(failed))
    differing: list[str] = []
    on_cpu: list[str] = []
    for script, (first, _), (second, _) in zip(scripts, served, real, strict=True):
        differing += [f"{script.name}: {words}" for words in differences(first, second)]
        on_cpu += [f"{script.name}: {name}" for (_, name), seen in second.items() if any("cpu" in at for _, at in seen)]
    bench.judge("types", not differing, f"{len(differing)} differences", note="; ".join(differing))
    bench.judge("devices", not on_cpu, f"{len(on_cpu)} on the CPU", note="; ".join(on_cpu))
    if torch.cuda.device_count() < 2:
        bench.leave_out("findings", "a rehearsal needs a GPU for each of its two ranks, and there is one")
        return
    unequal = [words for script in scripts if (words := _findings_differ(bench, script))]
    bench.judge("findings", not unequal, f"{len(unequal)} differences", note="; ".join(unequal))


def differences(stand_in: Trace, gpu: Trace) -> list[str]:
    """Return in words where the types differ, of what was seen on both; what ``torch.compile`` hides is on one."""
    found = []
    for key in sorted(stand_in.keys() & gpu.keys()):
        first, second = ({types.replace("bfloat16", "float16") for types, _ in trace[key]} for trace in (stand_in, gpu))
        if first != second:
            found.append(f"{key[1]} in a {key[0]}: {sorted(first - second)} on the stand-in, {sorted(second - first)}")
    return found


def trace_of(paths: Iterable[Path]) -> Trace:
    """Return what the processes of a job have noted."""
    found: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for path in paths:
        for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            entry = " -> ".join(",".join(types) for types in line["types"]), ",".join(line["devices"])
            found.setdefault((line["kind"], line["name"]), set()).add(entry)
    return {key: frozenset(entries) for key, entries in found.items()}


def _traced(bench: Bench, script: CudaScript, *, stand_in: bool) -> tuple[Trace, str]:
    """Train a script on one rank; what was noted, and why it did not come to its end."""
    folder = bench.folder / f"{script.name}-{'stand-in' if stand_in else 'cuda'}"
    project, traces = folder / "project", folder / "traces"
    traces.mkdir(parents=True)
    project.mkdir()
    script.lay_out(project)
    paths = (str(JOBS / "tracing"), os.environ.get("PYTHONPATH", ""))
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "ON_GPU_TRACE": str(traces), **_SLURM}
    variables["ON_GPU_STAND_IN"] = "1" if stand_in else ""
    path = project / script.script
    spawns = re.search(r"\b(spawn|start_processes)\(", path.read_text(encoding="utf-8")) is not None
    job = Job(folder / "job", str(path), *_ARGUMENTS.get(script.name, script.arguments), watched=False,
              launches_itself=spawns, variables=variables)  # fmt: skip
    try:
        ran = job.ended(120)
    except RuntimeError as error:
        return {}, str(error)
    last = (ran.output.strip().splitlines() or ["nothing"])[-1]
    return trace_of(traces.glob("trace-*.jsonl")), "" if ran.code == 0 else f"code {ran.code}, {last[:200]}"


def _findings_differ(bench: Bench, script: CudaScript) -> str:
    """Return in words how the findings of two rehearsals differ; nothing where they do not."""
    codes = {}
    for device in ("stand-in", "cuda"):
        project = bench.folder / f"{script.name}-check-{device}"
        project.mkdir()
        script.lay_out(project)
        state = str(project.with_suffix(".state"))
        _, report = check("--device", device, script.script, "--", *script.arguments, cwd=project, XDG_STATE_HOME=state)
        codes[device] = sorted(finding["code"] for finding in report["findings"])
    return "" if codes["stand-in"] == codes["cuda"] else f"{script.name}: {codes}"
