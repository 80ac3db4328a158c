"""Runs PyTorch's own tests of DDP inside of ranks that torchrun has started: ``torchrun torch_ranks.py TEST …``.

Without a name it runs all. Each test has a process group of its own.
"""

import datetime
import json
import os
import signal
import sys
import unittest

RANK = int(os.environ["RANK"])
TIMEOUT_S = 60
base = os.environ["PEERS_SCRATCH"]
os.environ.update(BACKEND="gloo", TEMP_DIR=base, INIT_METHOD=f"file://{base}/shared_init_file")

import torch.distributed as dist  # noqa: E402
from torch.testing._internal import common_utils  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402


class TestOnRanks(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """PyTorch's tests, to be called in the place of its own child processes."""


def outcome_of(name):
    """Run a test and return what became of it."""
    folder = os.environ["TEMP_DIR"] = os.path.join(base, name)
    for part in ("barrier", "test_dir", "init_dir"):
        os.makedirs(os.path.join(folder, part), exist_ok=True)
    distributed_test.Barrier.barrier_id = 0
    case = TestOnRanks(name)
    case.rank, case.file_name = RANK, os.path.join(folder, "store")
    common_utils.set_rng_seed()
    signal.alarm(2 * TIMEOUT_S)
    try:
        dist.init_process_group(
            "gloo",
            init_method=case.init_method,
            world_size=2,
            rank=RANK,
            timeout=datetime.timedelta(seconds=TIMEOUT_S),
        )
        case._barrier()  # As PyTorch's own: a test that is skipped would leave while the other rank connects.
        try:
            getattr(case, name)()
        except (unittest.SkipTest, SystemExit):
            case._barrier()
            raise
        case._barrier()
    except unittest.SkipTest:
        return "skipped"
    except SystemExit as left:
        skips = {skip.exit_code for skip in distributed_test.TEST_SKIPS.values()}
        return "skipped" if left.code in skips else f"left: {left.code}"
    except BaseException as error:
        print(f"{name}: {error!r}", file=sys.stderr, flush=True)
        return f"failed: {type(error).__name__}"
    finally:
        signal.alarm(0)
        if dist.is_initialized():
            dist.destroy_process_group()
    return "passed"


def too_late(number, frame):
    """End a test that hangs."""
    raise TimeoutError("the test has not ended")


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, too_late)
    every = unittest.TestLoader().getTestCaseNames(TestOnRanks)
    for name in sys.argv[1:] or every:
        outcome = outcome_of(name)
        with open(os.environ["PEERS_OUTCOMES"], "a") as file:
            file.write(json.dumps([name, str(RANK), outcome]) + "\n")
