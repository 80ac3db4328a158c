"""The right first causes of logs that are named ``torch<version>_<scenario>.log``; the logs lie elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

from tests.autopsy.cases import NOTHING, Expected

_BOTH = (0, 1)
_PARTED = ("DDP301", "DDP303", "DDP304")
GIVEN: dict[str, Expected] = {
    "barrier_timeout": Expected(("DDP308",), (1,)),
    "bn_single": Expected(("DDP706",), _BOTH),
    "client_timeout": Expected(("DDP705",)),
    "diff_model_count": Expected(("DDP304",)),
    "diff_model_shape": Expected(("DDP304",)),
    "double_backward_no_fwd": NOTHING,
    "exc": Expected(("DDP706",)),
    "exc__restarts": Expected(("DDP706",)),
    "exit3": Expected(("DDP306",), (1,)),
    "fup_unneeded": NOTHING,
    "inplace_buffer": Expected(("DDP706",), _BOTH),
    "launch_local_rank": Expected(("DDP503",)),
    "mismatch_dtype": Expected(("DDP304",)),
    "mismatch_op": Expected(("DDP304",)),
    "mismatch_shape": Expected(("DDP304",)),
    "missing_rank": Expected(("DDP705",)),
    "monitored_barrier": Expected(("DDP308",), (1,)),
    "monitored_barrier_all3": Expected(("DDP308",), (1, 2)),
    "nccl_missing": Expected(("DDP505",)),
    "no_grad_params": Expected(("DDP706",), _BOTH),
    "no_pg": Expected(("DDP706",), _BOTH),
    "outputs_unused_fup": NOTHING,
    "port_in_use": Expected(("DDP705",)),
    "rank0_only_eval": Expected(_PARTED),
    "rdzv_missing_node": Expected(("DDP705",)),
    "rdzv_unreachable": Expected(("DDP705",)),
    "ready_twice": NOTHING,
    "ready_twice__fup": Expected(("DDP210",), _BOTH),
    "record_exc": Expected(("DDP706",), (1,)),
    "sigabrt": Expected(("DDP703",), (1,)),
    "sigbus": Expected(("DDP703",), (1,)),
    "sighup": Expected(("DDP703",), (1,)),
    "sigkill": Expected(("DDP703",), (1,)),
    "sigsegv": Expected(("DDP703",), (1,)),
    "spawn_exc": Expected(("DDP706",), (1,)),
    "static_graph_changed": Expected(("DDP201",), _BOTH),
    "store_died": Expected(("DDP705",)),
    "store_get_timeout": Expected(("DDP705",)),
    "strides": NOTHING,
    "syncbn_cpu": Expected(("DDP706",), _BOTH),
    "torchrun_sigHUP": Expected(("DDP703",)),
    "torchrun_sigINT": Expected(("DDP703",)),
    "torchrun_sigTERM": Expected(("DDP703",)),
    "uneven_alive": Expected(("DDP308",), (1,)),
    "uneven_exit": Expected(("DDP306",)),
    "unused": Expected(("DDP201",), _BOTH),
    "unused_one_rank": Expected(("DDP201",), (1,)),
    "worker_bus": Expected(("DDP507",)),
    "worker_oom_kill": Expected(("DDP703",)),
}
"""By scenario; ``__detail`` and ``__info`` without a line of their own are as without."""
OF_ONE_VERSION: dict[tuple[str, str], Expected] = {
    # The old launcher passes the argument in the form that the script knows: the job runs.
    ("1.12.1", "launch_local_rank"): NOTHING,
    # torch 2.13 ends in gloo.s teardown, after the backward in place had passed.
    ("2.13.0", "inplace_buffer"): Expected(("DDP703",), (0,)),
    # The log of this name holds a port in use and no SIGBUS.
    ("2.13.0", "sigbus"): Expected(("DDP705",)),
    ("1.12.1", "ready_twice__detail"): NOTHING,
}
CRASHES_IN_DETAIL = frozenset({"rank0_only_eval", "ready_twice", "uneven_alive", "unused", "unused_one_rank"})
"""torch 2.13 segfaults on both ranks when DDP is built with TORCH_DISTRIBUTED_DEBUG=DETAIL on gloo."""
_NAME = re.compile(r"torch(?P<version>[\d.]+)_(?P<scenario>\w+)\.log")


def expected_of(path: Path) -> Expected | None:
    """What a log has to be diagnosed as, by its name; None where nothing is known of it."""
    match = _NAME.match(path.name)
    if match is None:
        return None
    scenario, version = match["scenario"], match["version"]
    base = scenario.removesuffix("__detail").removesuffix("__info")
    if (version, scenario) in OF_ONE_VERSION:
        return OF_ONE_VERSION[version, scenario]
    if version == "2.13.0" and scenario.endswith("__detail") and base in CRASHES_IN_DETAIL:
        return Expected(("DDP703",), _BOTH)
    return GIVEN.get(scenario, GIVEN.get(base))
