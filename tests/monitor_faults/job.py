"""The training that is watched: DDP on gloo, a few seconds, the same to the bit each time.

Usage: job.py OUT STEPS FAULT_STEP. Rank N writes its process id to OUT/pid.N, the number of its newest step to
OUT/step.N, and at the end the digest of weights and optimizer state to OUT/hash.N. ``FAULT_FIRST`` is Python that is
executed before torch is imported, ``FAULT`` at step FAULT_STEP, ``FAULT_LAST`` after the digest.
"""

import os
import sys

OUT, STEPS, FAULT_STEP = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
RANK = int(os.environ["RANK"])


def write(name: str, text: str) -> None:
    """Write a file whole, so that whoever waits for it finds it complete; a fault may have made that impossible."""
    path = os.path.join(OUT, f"{name}.{RANK}")
    try:
        with open(path + ".part", "w") as file:
            file.write(text)
        os.replace(path + ".part", path)
    except OSError:
        pass


def say(text: str) -> None:
    """Print a line; a fault may have taken the stream away."""
    if sys.stdout is not None:
        sys.stdout.write(text + "\n")  # In one piece: the other rank prints, too.
        sys.stdout.flush()


def do(fault: str) -> None:
    """Do what the row of the table says."""
    exec(compile(os.environ.get(fault, ""), fault, "exec"), globals())


write("pid", str(os.getpid()))
do("FAULT_FIRST")

import hashlib  # noqa: E402
import time  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Dropout(), nn.Linear(32, 4))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = torch.Generator().manual_seed(RANK)
    for step in range(STEPS):
        write("step", str(step))
        if step == FAULT_STEP:
            state = torch.get_rng_state()
            do("FAULT")
            torch.set_rng_state(state)
        inputs = torch.randn(8, 64, generator=batches)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        time.sleep(0.02)
        say(f"rank {RANK} step {step}")
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    for state in optimizer.state_dict()["state"].values():
        digest.update(state["momentum_buffer"].numpy().tobytes())
    say(f"rank {RANK} ends with {digest.hexdigest()}")
    write("hash", digest.hexdigest())
    del model
    do("FAULT_LAST")
    dist.destroy_process_group()


main()
