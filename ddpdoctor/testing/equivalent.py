"""An assertion for a library's own tests: a training step on several ranks computes the gradient of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ddpdoctor.diagnosis.training.equivalence import compare
from ddpdoctor.diagnosis.training.equivalence_words import sentence
from ddpdoctor.diagnosis.training.first_steps import Gradient, Runs, Step
from ddpdoctor.probe.free_port import free_port
from ddpdoctor.testing.warm_rank import imported

WORST_SHOWN = 5
LOOK_EVERY_S = 0.05


def assert_equivalent(step: Callable[[], Any], ranks: int = 2, *, timeout_s: float = 120.0) -> None:
    """Assert that ``step`` leaves the same gradients on several ranks as in one process.

    ``step`` is a function of a module's. It is called in processes of their own, in a group of ``ranks`` gloo ranks
    and in a group of one: it builds its model from a fixed seed, takes the samples that are its rank's, all of them in
    a group of one, makes its backward passes, and returns the model, whose gradients are compared.

    Raises AssertionError with how they differ, or with the output of a rank that failed or took longer.
    """
    where = sys.modules[step.__module__].__file__
    if where is None or "." in step.__qualname__:
        raise TypeError("the step has to be a function of a module, not one inside of a function or a class")
    with tempfile.TemporaryDirectory(prefix="ddpdoctor-equivalent-") as name:
        spec = {"module": step.__module__, "file": where, "function": step.__qualname__, "directory": name}
        of_ranks = _run(spec, ranks, timeout_s)
        one = _run(spec, 1, timeout_s)
    if not one[0].gradients or any(len(of_rank.gradients) != len(one[0].gradients) for of_rank in of_ranks):
        raise AssertionError("the step returns no gradients, or those of other parameters in one process")
    runs = Runs(ranks=tuple((of_rank,) for of_rank in of_ranks), one=(one[0],), has_loaders=False, in_turn=True)
    section = compare(runs)
    if section.status != "equal":
        raise AssertionError("\n".join((sentence(section), *_worst(of_ranks[0], one[0]))))


def _worst(mine: Step, one: Step) -> Iterator[str]:
    rows = []
    for a, b in zip(mine.gradients, one.gradients, strict=True):
        values = list(zip(a.values or (), b.values or (), strict=False))
        norm = sum(y * y for _, y in values) ** 0.5
        apart = sum((x - y) ** 2 for x, y in values) ** 0.5
        rows.append((apart / norm if norm else apart, a.name))
    for share, name in sorted(rows, reverse=True)[:WORST_SHOWN]:
        yield f"  {name}: differs by {share:.2g} of its norm"


def _run(spec: dict[str, str], world: int, timeout_s: float) -> list[Step]:
    """Run the step on so many ranks."""
    directory = Path(spec["directory"])
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(world):
        environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-u", "-m", "ddpdoctor.testing.equivalent", json.dumps(spec)]
        with (directory / f"output-{world}-{rank}").open("wb") as output:
            processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
    ends_s = time.monotonic() + timeout_s
    try:
        while any(one.poll() is None for one in processes):
            failed = any(one.returncode for one in processes)
            if failed or time.monotonic() > ends_s:
                break
            time.sleep(LOOK_EVERY_S)
    finally:
        for one in processes:
            one.kill()
            one.wait()
    found = [directory / f"gradients-{world}-{rank}.json" for rank in range(world)]
    if not all(path.exists() for path in found):
        rank = next((rank for rank, one in enumerate(processes) if one.returncode > 0), 0)
        output_text = (directory / f"output-{world}-{rank}").read_text(encoding="utf-8", errors="replace")
        why = f"failed, or took more than {timeout_s:g} s"
        raise AssertionError(f"the step {why} on rank {rank} of {world}:\n{output_text[-4000:]}")
    return [_step(json.loads(path.read_bytes())) for path in found]


def _step(content: dict[str, Any]) -> Step:
    gradients = tuple(
        Gradient(0, name, None if values is None else array("d", values), None)
        for name, values in content["gradients"].items()
    )
    return Step(optimizer=0, ordinal=1, gradients=gradients, facts={"reduced_precision": content["reduced"]})


def _be_rank(spec: dict[str, str]) -> None:
    """Call the step in a group and write the gradients that it leaves."""
    import torch
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    module = imported([(spec["module"], spec["file"])], rewrite=False)
    model = getattr(module, spec["function"])()
    kept = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    named = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in kept.items()}
    gradients = {name: None if g is None else g.detach().float().flatten().tolist() for name, g in named.items()}
    reduced = any(g is not None and g.dtype in (torch.float16, torch.bfloat16) for g in named.values())
    path = Path(spec["directory"]) / f"gradients-{world}-{rank}.json"
    path.with_suffix(".new").write_text(json.dumps({"gradients": gradients, "reduced": reduced}), encoding="utf-8")
    path.with_suffix(".new").rename(path)
    dist.barrier()
    os._exit(0)  # Teardown of a group on gloo ends some healthy processes with SIGABRT.


if __name__ == "__main__":
    _be_rank(json.loads(sys.argv[1]))
