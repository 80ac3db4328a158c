"""Bits that are flipped in a parameter of one rank, and what must be said of each: ``python -m tests.nan --flips``.

The first bit of an exponent makes a value so large that training is not finite any more before the replicas are looked
at again, and that is what is said. Rounding may undo the lowest bit of a small number: the job itself notes after each
round what the parameter is, and nothing must be said of replicas that are the same again at each look.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from ddpdoctor.checks.gradients import nonfinite_training
from ddpdoctor.diagnosis.training.replicas import drifted_digests
from ddpdoctor.launch.environment import observed
from ddpdoctor.record.assembly.assemble import Assembly
from ddpdoctor.record.model import Job
from tests.nan.cases import HEAD

RANKS = (2, 3, 4, 3, 3)
"""Of each job. The last one flips the lowest bits of all, early: some of them are undone."""
DTYPES = ("float32", "bfloat16", "float16", "float64", "float32")
"""Of each model of a job: all of them are stepped in turn."""
OPTIMIZERS = (
    "SGD(P, lr=1e-3, momentum=0.9)",
    "SGD(P, lr=1e-3)",
    "SGD(P, lr=1e-3)",
    "AdamW(P, lr=1e-3)",
    "Adam(P, lr=1e-4)",
)
NAMES = ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias")
BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "float64": 64}
ROUNDS = 130
AT = (4, 27, 43, 90, 66)
"""Rounds after which a bit is flipped, in the models of a job."""
_JOB = """
import json, zlib
flips, dtypes = FLIPS, DTYPES
models, optimizers, held = [], [], []
for dtype in dtypes:
    kind = type(f"Net{len(models)}", (nn.Sequential,), {})
    net = kind(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)).to(getattr(torch, dtype))
    models.append(DDP(net))
    P = net.parameters()
    optimizers.append(OPTIMIZER)
torch.manual_seed(rank)
for now in range(ROUNDS):
    for number, (model, optimizer) in enumerate(zip(models, optimizers)):
        dtype = getattr(torch, dtypes[number])
        optimizer.zero_grad()
        F.mse_loss(model(torch.randn(4, 6).to(dtype)), torch.randn(4, 3).to(dtype)).backward()
        optimizer.step()
        at, on, name, element, bit = flips[number]
        if now == at and rank == on:
            kept = dict(model.module.named_parameters())[name].data.view(-1)
            whole = kept.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[kept.element_size()])
            bits = 8 * kept.element_size()
            whole[element] ^= -(1 << bits - 1) if bit == bits - 1 else 1 << bit
        mine = dict(model.module.named_parameters())[flips[number][2]].detach().contiguous()
        held.append(zlib.crc32(mine.view(torch.uint8).numpy().tobytes()))
with open(f"held-{rank}", "w") as file: json.dump(held, file)
time.sleep(0.2)
dist.destroy_process_group()
"""


class Flip(msgspec.Struct, frozen=True, kw_only=True):
    """One bit of one parameter of one rank."""

    at: int
    """The round after which it is flipped."""
    rank: int
    name: str
    element: int
    bit: int


def flips(job: int) -> list[Flip]:
    """Return those of a job, one in each of its models: other rounds, ranks, parameters, and bits from low to high."""
    found = []
    for model, dtype in enumerate(DTYPES):
        number = job * len(DTYPES) + model
        name = NAMES[number % len(NAMES)]
        bit, at = (number * 7 + 1) % BITS[dtype], AT[(model + job) % len(AT)]
        if job == len(RANKS) - 1:
            bit, at = 0, AT[0] + model
        found.append(Flip(at=at, rank=number % RANKS[job], name=name, element=number % 3, bit=bit))
    return found


def wrong_flips(job: int, folder: Path) -> dict[str, str]:
    """Run a job, and return what is wrong with what is said of each of its flips; empty for what is right."""
    chosen = flips(job)
    text = HEAD + _JOB.replace("FLIPS", repr([msgspec.structs.astuple(one) for one in chosen]))
    text = text.replace("DTYPES", repr(DTYPES)).replace("ROUNDS", str(ROUNDS))
    made = " if len(models) == {} else ".join(f"torch.optim.{one}" for one in OPTIMIZERS)
    text = text.replace("OPTIMIZER", made.format(1, 2, 3, 4))
    (folder / "train.py").write_text(text)
    run = folder / "run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS[job]}", "train.py"]
    subprocess.run(command, cwd=folder, env=environment | observed(run, environment), check=True, capture_output=True)
    assembly = Assembly(run)
    assembly.poll()
    assembly.poll()
    record = assembly.record(Job(kind="run", world_size=RANKS[job]))
    said = {int(one.sentence.partition(" differ ")[0][-1]): one for one in drifted_digests(record)}
    not_finite = list(nonfinite_training.in_run(record))
    looks = sorted({row.step for row in record.replica_digests})
    held = [json.loads((folder / f"held-{rank}").read_text()) for rank in range(RANKS[job])]
    wrong = {}
    for model, flip in enumerate(chosen):
        made_steps = flip.at * len(DTYPES) + model + 1
        # Steps of this model up to the look, and of those the newest.
        newest = {look: look - 1 - (look - 1 - model) % len(DTYPES) for look in looks if look >= made_steps}
        step = next((look for look, at in newest.items() if len({own[at] for own in held}) > 1), 0)
        odd = f"rank {flip.rank} has other ones than the rest" if RANKS[job] > 2 else "ranks 0 and 1 do not agree"
        found = said.get(model)
        explodes = flip.bit == BITS[DTYPES[model]] - 2
        right = (
            bool(not_finite)
            if explodes
            else found is None
            if not step
            else found is not None and found.sentence.endswith(f"after step {step:,}: {odd}, of {flip.name} first")
        )
        where = f"{flip.name} on rank {flip.rank} after step {made_steps}"
        label = (
            f"{'' if step or explodes else 'undone: '}{RANKS[job]} ranks, {DTYPES[model]}: bit {flip.bit} of {where}"
        )
        wrong[label] = "" if right else f"said: {found}; looked at {looks}"
    return wrong
