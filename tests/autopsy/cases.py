"""What the jobs and the given logs have to be diagnosed as."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "{ranks}", "--master-port", "{{port}}")


class Expected(msgspec.Struct, frozen=True):
    """The right first cause of a log."""

    codes: tuple[str, ...]
    """Any of them is right; none where the log shows no cause of a death."""
    ranks: tuple[int, ...] = ()
    """Where the log tells the rank; nothing is asked of the ranks otherwise."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A job of our own."""

    name: str
    job: str
    script: str = "train.py"
    expected: Expected
    launcher: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    taken_port: bool = False
    signal: int = 0
    """Sent to the launcher."""


def _run(job: str, expected: Expected, *, ranks: int = 2, name: str = "", options: str = "", **fields: Any) -> Recorded:
    words = tuple(word.format(ranks=ranks) for word in TORCHRUN)
    return Recorded(name=name or job, job=job, expected=expected, launcher=(*words, *options.split()), **fields)


def _one(job: str, expected: Expected) -> Recorded:
    return Recorded(name=job, job=job, expected=expected)


_DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
NOTHING = Expected(())
JOBS: tuple[Recorded, ...] = (
    _run("bad_sample", Expected(("DDP706",), (1,))),
    _run("bad_sample", Expected(("DDP706",), (1,)), ranks=4, name="bad_sample_of_four"),
    _run("bad_sample", Expected(("DDP706",), (1,)), name="bad_sample_restarts", options="--max-restarts 2"),
    _run("bad_sample", Expected(("DDP706",), (1,)), name="bad_sample_tee", options="--tee 3 --log-dir {logs}"),
    _run("bad_sample_in_worker", Expected(("DDP706",), (1,))),
    _run("killed_worker", Expected(("DDP703",), (0,))),
    _run("assertion", Expected(("DDP706",), (2,)), ranks=3),
    _run("exit_code", Expected(("DDP306",), (0,))),
    _run("leaves_silently", Expected(("DDP306",))),
    _run("fewer_batches", Expected(("DDP306",))),
    _run("sigkill", Expected(("DDP703",), (1,))),
    _run("sigkill", Expected(("DDP703",), (1,)), ranks=4, name="sigkill_of_four"),
    _run("sigfpe", Expected(("DDP703",), (1,))),
    _run("sigterm_to_one", Expected(("DDP703",), (1,))),
    _run("segfault", Expected(("DDP703",), (1,))),
    _run("abort", Expected(("DDP703",), (1,))),
    _run("lone_barrier", Expected(("DDP308",), (1,))),
    _run("sleeper", Expected(("DDP308",), (1,))),
    _run("sleeper", Expected(("DDP308",), (1,)), ranks=3, name="sleeper_of_three"),
    _run("other_collective", Expected(("DDP301", "DDP304"))),
    _run("other_collective", Expected(("DDP301", "DDP304")), name="other_collective_detail", environment=_DETAIL),
    _run("other_shape", Expected(("DDP304",))),
    _run("other_shape", Expected(("DDP304",)), name="other_shape_detail", environment=_DETAIL),
    _run("other_dtype", Expected(("DDP304",))),
    _run("unused", Expected(("DDP201",), (0, 1))),
    _run("unused", Expected(("DDP201",), (0, 1)), name="unused_detail", environment=_DETAIL),
    _run("unused_on_one_rank", Expected(("DDP201",))),
    _run("other_depth", Expected(("DDP304",))),
    _run("other_width", Expected(("DDP304",))),
    _run("ready_twice", Expected(("DDP210",), (0, 1))),
    _run("out_of_memory", Expected(("DDP702",), (1,))),
    _run("memory_limit", Expected(("DDP702",), (0,))),
    _run("port_in_use", Expected(("DDP705",)), taken_port=True),
    _one("unreachable", Expected(("DDP705",))),
    _one("missing_rank", Expected(("DDP705",))),
    _run("missing_module", Expected(("DDP706",), (0, 1))),
    _run("missing_file", Expected(("DDP706",), (1,))),
    _run("unknown_option", Expected(("DDP503",)), arguments=("--local-rank=0",)),
    _run("monitored_barrier", Expected(("DDP308",), (2,)), ranks=3),
    _run("endless_recursion", Expected(("DDP706",), (1,))),
    _run("backward_twice", Expected(("DDP706",), (0, 1))),
    _run("rethrown_loss_of_peer", Expected(("DDP706",), (1,))),
    _one("store_key", Expected(("DDP705",))),
    _run("group_of_some", Expected(("DDP705", "DDP308", "DDP309"))),
    _run("nccl_without_gpu", Expected(("DDP505",))),
    _run("no_driver", Expected(("DDP706",), (0, 1))),
    _run("no_group", Expected(("DDP706",), (0, 1))),
    _run("frozen", Expected(("DDP706",), (0, 1))),
    _run("healthy", NOTHING),
    _run("needless_flag", NOTHING),
    _run("sleeps", Expected(("DDP703",)), name="launcher_sigterm", signal=15),
    _run("sleeps", Expected(("DDP703",)), name="launcher_sigint", signal=2),
    _one("spawned_exception", Expected(("DDP706",), (1,))),
    _one("spawned_kill", Expected(("DDP703",), (1,))),
)
