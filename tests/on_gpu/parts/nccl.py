"""What NCCL and CUDA say when a job dies: watched, in the log alone, and in the flight recorder's dump."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence

from tests.on_gpu.claims import Bench, Claim
from tests.on_gpu.runs import Job, Ran, autopsy, codes_of

LIMIT_S = 300.0
HANGS = ("DDP301", "DDP302", "DDP303", "DDP304", "DDP305", "DDP306", "DDP308", "DDP312")
FIRST_WITH_SHARED_GPUS = (2, 30)
"""From this NCCL on ranks may share a GPU, where ``NCCL_MULTI_RANK_GPU_ENABLE`` allows it."""
CLAIMS = {
    "one_sided": Claim("gloo, on two ranks that share the GPU: a collective that rank 0 alone enters is named while it "
                       "lasts", "a hang is named before the end", pretends=True),
    "verdict": Claim("so it is in the final verdict, with the rank that stays away", "broken, by rank 1",
                     pretends=True),
    "log": Claim("and by the log alone", "one of " + ", ".join(HANGS), pretends=True),
    "nccl_one_sided": Claim("NCCL, on two ranks that share the GPU: the same", "a hang in the final verdict"),
    "watchdog": Claim("NCCL's watchdog ends a collective that lasts too long: the final verdict", "DDP308"),
    "watchdog_log": Claim("its log", "DDP308"),
    "dump": Claim("the flight recorder's dump of it is read", "it names all_reduce"),
    "debug": Claim("NCCL_DEBUG=INFO: the log of a healthy job", "no finding"),
    "one_device": Claim("two ranks of NCCL on one GPU, which NCCL refuses: the log", "DDP701 or DDP502"),
    "no_device": Claim("a GPU that is not there: the log", "DDP706 or DDP501, with the line"),
    "out_of_memory": Claim("CUDA out of memory: the log", "DDP702"),
    "device_assert": Claim("a device-side assert: the log", "DDP704"),
    "illegal_access": Claim("an illegal memory access: the log", "DDP704"),
    "xid": Claim("the driver's Xid of it in the kernel's log", "DDP704"),
}  # fmt: skip


def measure(bench: Bench) -> None:
    """Judge the claims; what may harm the context of others comes last."""
    _one_sided(bench)
    if bench.pretends:
        return
    import torch  # Not for those who only ask what is claimed: it takes seconds.

    shares = torch.cuda.nccl.version()[:2] >= FIRST_WITH_SHARED_GPUS
    if shares:
        ran = _job(bench, "one_sided_nccl", nproc=2, watched=True, variables={"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
        bench.judge("nccl_one_sided", bool(set(HANGS) & set(_final(ran))), ", ".join(_final(ran)) or "no finding")
    else:
        bench.leave_out("nccl_one_sided", "this NCCL lets no two ranks share a GPU")
    _watchdog(bench)
    ran = _job(bench, "healthy", variables={"NCCL_DEBUG": "INFO"})
    ran.truth()
    report = autopsy(ran.folder / "output.txt")
    lines = sum("NCCL INFO" in line for line in ran.output.splitlines())
    bench.judge("debug", not codes_of(report) and lines > 0, f"{codes_of(report)} in {lines} lines of NCCL")
    # Without the variable every NCCL refuses.
    _by_log(bench, "one_device", ("DDP701", "DDP502"), nproc=2, variables={"NCCL_DEBUG": "WARN"})
    _by_log(bench, "no_device", ("DDP706", "DDP501"))
    _by_log(bench, "out_of_memory", ("DDP702",))
    _by_log(bench, "device_assert", ("DDP704",))
    before = _kernel_log()
    _by_log(bench, "illegal_access", ("DDP704",))
    new = [line for line in _kernel_log() or () if line not in (before or ())]
    if not any("Xid" in line for line in new):
        bench.leave_out("xid", "the kernel's log cannot be read here, or has no Xid")
        return
    (bench.folder / "kernel.log").write_text("\n".join(new) + "\n", encoding="utf-8")
    found = codes_of(autopsy(bench.folder / "kernel.log"))
    bench.judge("xid", "DDP704" in found, ", ".join(found) or "no finding", note=new[0][:200])


def _one_sided(bench: Bench) -> None:
    ran = _job(bench, "one_sided", nproc=2, watched=True)
    said = [line for line in ran.output.splitlines() if "ddpdoctor: " in line]
    ends = next((place for place, line in enumerate(said) if "finished" in line), len(said))
    named = [line for line in said[:ends] if any(code in line for code in HANGS) or "STALLED" in line]
    bench.judge("one_sided", bool(named), named[0] if named else "nothing was named")
    verdict = ran.report["verdict"]
    told = json.dumps(verdict)
    bench.judge("verdict", verdict["state"] == "broken" and "rank 1" in told, f"{verdict['state']}: {verdict['text']}")
    plain = _job(bench, "one_sided", nproc=2, suffix="-plain")
    found = codes_of(autopsy(plain.folder / "output.txt"))
    bench.judge("log", bool(set(found) & set(HANGS)), ", ".join(found) or "no finding")


def _watchdog(bench: Bench) -> None:
    dumps = bench.folder / "dumps"
    dumps.mkdir()
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    sizes = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    variables = dict.fromkeys(names, str(dumps / "rank_")) | dict.fromkeys(sizes, "2000")
    variables["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
    ran = _job(bench, "watchdog", watched=True, variables=variables)
    bench.judge("watchdog", "DDP308" in _final(ran), ", ".join(_final(ran)) or "no finding")
    found = codes_of(autopsy(ran.folder / "output.txt"))
    bench.judge("watchdog_log", "DDP308" in found, ", ".join(found) or "no finding")
    files = [path for path in dumps.iterdir() if path.stat().st_size]
    if not files:
        bench.judge("dump", False, "no dump was written")
        return
    report = autopsy(dumps, ran.folder / "output.txt")
    bench.judge("dump", "all_reduce" in json.dumps(report).lower(), f"{len(files)} dump(s), {codes_of(report)}")


def _by_log(
    bench: Bench, kind: str, expected: Sequence[str], nproc: int = 1, variables: Mapping[str, str] | None = None
) -> None:
    ran = _job(bench, kind, nproc=nproc, variables=variables)
    if ran.code == 0:
        bench.judge(kind, False, "the job ended well")
        return
    report = autopsy(ran.folder / "output.txt")
    first = report["findings"][0]["title"] if report["findings"] else "no finding"
    bench.judge(kind, bool(set(codes_of(report)) & set(expected)), f"{codes_of(report)} {first}")


def _job(
    bench: Bench,
    kind: str,
    nproc: int = 1,
    *,
    watched: bool = False,
    suffix: str = "",
    variables: Mapping[str, str] | None = None,
) -> Ran:
    folder = bench.folder / f"{kind}{suffix}"
    return Job(folder, "faults", kind, nproc=nproc, watched=watched, variables=variables).ended(150)


def _final(ran: Ran) -> list[str]:
    """Codes of the final report of a watched job, that of its verdict first."""
    return list(dict.fromkeys(filter(None, (ran.report["verdict"]["code"], *codes_of(ran.report)))))


def _kernel_log() -> list[str] | None:
    try:
        done = subprocess.run(("dmesg",), capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None
