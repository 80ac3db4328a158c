"""Rehearsals on forks of a process that has imported torch: real ranks on gloo with the real hooks, in a second.

There is no launcher and no box, and what a rank prints goes to a file. ``check`` is ``ddpdoctor check`` on such ranks:
the source, the checks, what merges both, and the report are those of the command.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import runpy
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ddpdoctor import api
from ddpdoctor.examination import Examination
from ddpdoctor.launch.rehearsal_plan import batch_size
from ddpdoctor.launch.request import RehearsalRequest
from ddpdoctor.monitor.rehearsal import _AS_ASKED
from ddpdoctor.monitor.rehearsed_ranks import RehearsedRanks
from ddpdoctor.probe.free_port import free_port
from ddpdoctor.record import layout
from ddpdoctor.record.model import Job, RunRecord
from ddpdoctor.record.writer import epoch_ns, kept_clock

LIMIT_S = 120.0


def check(script: Path, *arguments: str, **options: Any) -> dict[str, Any]:
    """Return the report on a script; what ``ddpdoctor.check`` takes may be set."""
    from ddpdoctor.cli.output import checks_of
    from ddpdoctor.report.formats import rendered

    examination = examine(script, *arguments, **options)
    report: dict[str, Any] = json.loads(rendered(examination, "json", checks_of, 80, colour=False))
    return report


def examine(script: Path, *arguments: str, **options: Any) -> Examination:
    """Examine a script as ``check`` does, in its directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddpdoctor.monitor.rehearsal.rehearse", lambda request, on_progress: rehearse(request))
        patch.chdir(script.parent)
        return api.check(script, arguments, **{"equivalence": False, **options})


def rehearse(request: RehearsalRequest) -> RunRecord:
    """Run the script of a request in its directory on as many forks as it has ranks."""
    # What DDP imports when it wraps a model takes longer than all else that a fork does.
    import torch._dynamo
    import torch.distributed.nn
    import torch.onnx
    import torch.utils._python_dispatch
    import torch.utils.data.distributed  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="forks-") as name:
        directory = Path(name)
        job = Job(kind="rehearsal", script=str(request.script), device=request.device, started_ns=epoch_ns())
        plan = {
            "version": layout.VERSION,
            "kind": "rehearsal",
            "clock": kept_clock(),
            "project_root": str(request.script.parent),
            **{name: getattr(request, name) for name in _AS_ASKED},
            "batch_size": batch_size(request, request.device),
            "time_limit_s": LIMIT_S,
            "device": request.device,
            # Of a job on GPUs: before torch 2.13 gloo alone gives a sum where fully_shard asks for a mean.
            "in_a_gpus_place": request.device == "cpu",
            "ranks_per_node": request.nproc // request.nodes,
            "gpus_per_node": request.gpus_per_node or request.nproc // request.nodes,
            "job": msgspec.to_builtins(job),
        }
        (directory / layout.JOB_FILE).write_text(json.dumps(plan), encoding="utf-8")
        port = free_port()
        children = [_fork(directory, plan, request, rank, port) for rank in range(request.nproc)]
        _wait(children)
        ranks = RehearsedRanks(directory, LIMIT_S)
        ranks.look(epoch_ns())
        record = ranks.record(msgspec.structs.replace(job, ended_ns=epoch_ns()))
        ranks.close()
        if request.first_steps is not None and (directory / "equivalence").is_dir():
            shutil.copytree(directory / "equivalence", request.first_steps, dirs_exist_ok=True)
        outputs = (path.read_text(errors="replace")[-3000:] for path in sorted(directory.glob("output-*")))
        return msgspec.structs.replace(record, job=msgspec.structs.replace(record.job, output_tail="".join(outputs)))


def _fork(directory: Path, plan: dict[str, object], request: RehearsalRequest, rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    atexit._clear()  # Nothing of the test process that it was forked from may be ended in order.
    try:
        _be_rank(directory, plan, request, rank, port)
    except SystemExit:
        pass
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os.kill(os.getpid(), 9)
    return 0


def _be_rank(directory: Path, plan: dict[str, object], request: RehearsalRequest, rank: int, port: int) -> None:
    # A job has none of the modules of the tests: what is looked for in the user's code would be found in them.
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "conftest")]:
        del sys.modules[name]
    output = os.open(directory / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    here = request.nproc // request.nodes
    numbers = {"RANK": rank, "LOCAL_RANK": rank % here, "WORLD_SIZE": request.nproc, "LOCAL_WORLD_SIZE": here}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    import numpy as np
    import torch

    warnings.resetwarnings()  # A warning is an error in a test, and none in a job.
    from ddpdoctor.probe.journal import Journal
    from ddpdoctor.probe.process import ProcessEnd
    from ddpdoctor.probe.rehearsal.install import Rehearsal

    torch.set_num_threads(1)
    for seed in (torch.seed, random.seed, np.random.seed):
        seed()  # Each process of a job begins with draws of its own.
    journal = Journal(str(directory), dict(plan))
    journal.rank = rank
    journal.event(
        "process", parent=os.getppid(), owner=0, rank=rank, local_rank=rank % here, node=rank // here, kind="start"
    )
    end = ProcessEnd(journal)
    end.install()
    Rehearsal(journal, end).after_torch(torch)
    journal.event("torch", version=str(torch.__version__))
    os.chdir(request.script.parent)
    sys.argv = [str(request.script), *request.arguments]
    sys.path.insert(0, str(request.script.parent))
    runpy.run_path(str(request.script), run_name="__main__")


def _wait(children: list[int]) -> None:
    ends_s, left = time.monotonic() + LIMIT_S, set(children)
    failed_s: float | None = None
    while left:
        for pid in list(left):
            ended, _ = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.discard(pid)
                failed_s = failed_s or time.monotonic()
        # A rank whose peers are gone waits for them in vain.
        if left and (time.monotonic() > ends_s or (failed_s and time.monotonic() > failed_s + 20)):
            for pid in left:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
            return
        time.sleep(0.02)
