"""Runs a script as it is and, as it ends, notes a digest of its models, its optimizers and the state of each generator.

``torchrun final_state.py SCRIPT …``: the digests are lines of the file that ``PEERS_OUTCOMES`` names.
"""

import gc
import hashlib
import json
import os
import random
import runpy
import sys

import numpy
import torch

torch.manual_seed(1234 + int(os.environ.get("RANK", "0")))
numpy.random.seed(1234)
random.seed(1234)


def digest(value):
    """Return a digest that two values share only if they are equal to the bit."""
    hashed = hashlib.sha256()

    def add(part):
        if isinstance(part, torch.Tensor):
            hashed.update(f"{part.dtype} {tuple(part.shape)}".encode())
            hashed.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            for key in part:
                hashed.update(repr(key).encode())
                add(part[key])
        elif isinstance(part, (list, tuple)):
            for item in part:
                add(item)
        else:
            hashed.update(repr(part).encode())

    add(value)
    return hashed.hexdigest()[:16]


def note(models, optimizers):
    """Write the digests of this rank."""
    states = {
        "weights": [dict(model.state_dict()) for model in models],
        "gradients": [[one.grad for one in model.parameters() if one.grad is not None] for model in models],
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "torch's generator": torch.get_rng_state(),
        "random": random.getstate(),
        "numpy's generator": [part.tolist() if hasattr(part, "tolist") else part for part in numpy.random.get_state()],
    }
    with open(os.environ["PEERS_OUTCOMES"], "a") as file:
        for name, state in states.items():
            seen = f"{len(state)} " if name in ("weights", "optimizers") else ""
            file.write(json.dumps([name, os.environ.get("RANK", ""), seen + digest(state)]) + "\n")


if __name__ == "__main__":
    models, optimizers = [], []

    def kept(owner, of):
        made = owner.__init__

        def __init__(self, *arguments, **options):
            made(self, *arguments, **options)
            of.append(self)

        owner.__init__ = __init__

    kept(torch.nn.parallel.DistributedDataParallel, models)
    kept(torch.optim.Optimizer, optimizers)
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
    gc.collect()
    note(models, optimizers)
