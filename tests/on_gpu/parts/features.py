"""What torch can do beside the plain loop, watched without change of the result."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.on_gpu.claims import Bench, Claim
from tests.on_gpu.runs import Job

LIMIT_S = 240.0
TOGETHER = 4
"""Jobs that run at once on a GPU machine; none of them is timed."""
_SAME = "the bits of the plain run"
CLAIMS = {
    "compile": Claim("torch.compile", _SAME, pretends=True),
    "graphs": Claim("CUDA graphs: a captured step with DDP, while the probe's thread has events to read", _SAME),
    "amp": Claim("AMP with a GradScaler", _SAME, pretends=True),
    "channels_last": Claim("channels-last convolutions", _SAME, pretends=True),
    "prefetching": Claim("a loader with workers that prefetches, and pins where there is a GPU", _SAME, pretends=True),
    "fully_shard": Claim("fully_shard on one rank, of NCCL where there is a GPU", _SAME, pretends=True),
    "fully_shard_gloo": Claim("fully_shard on two ranks of gloo", _SAME, pretends=True),
}


def measure(bench: Bench) -> None:
    """Judge the claims: on a GPU a job for each, without one a job for all."""
    of_one = [name for name in CLAIMS if name != "fully_shard_gloo" and (not bench.pretends or CLAIMS[name].pretends)]
    groups = [(1, of_one)] if bench.pretends else [(1, [name]) for name in of_one]
    groups.append((2, ["fully_shard"]))
    with ThreadPoolExecutor(1 if bench.pretends else TOGETHER) as pool:
        for future in [pool.submit(_group, bench, nproc, names) for nproc, names in groups]:
            for key, plain, watched in future.result():
                failed = plain.startswith("failed") or watched.startswith("failed")
                bench.judge(key, plain == watched and not failed, watched[:300], expected=plain[:300])


def _group(bench: Bench, nproc: int, names: list[str]) -> list[tuple[str, str, str]]:
    """Return by claim the digests of a plain and of a watched run; words where one failed."""
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if "graphs" in names:
        variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # The notes ask for it where NCCL is captured.
    found: list[list[dict[str, str]]] = []
    for watched in (False, True):
        folder = bench.folder / f"{'-'.join(names)}-{nproc}-{'watched' if watched else 'plain'}"
        try:
            ran = Job(folder, "features", ",".join(names), nproc=nproc, watched=watched, variables=variables).ended(180)
            found.append([ran.truth(rank)["digests"] for rank in range(nproc)])
        except RuntimeError as error:
            found.append([dict.fromkeys(names, f"failed: {error}")] * nproc)
    suffix = "_gloo" if nproc > 1 else ""
    plain, watched_run = found
    return [
        (name + suffix, " ".join(one[name] for one in plain), " ".join(one[name] for one in watched_run))
        for name in names
    ]
