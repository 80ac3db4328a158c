"""Compares the ranks of a case with one process, and says what of the answer is wrong."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import torch
import torch.distributed.fsdp

from ddpdoctor.diagnosis.training.equivalence_words import sentence
from ddpdoctor.equivalence_section import EquivalenceSection
from ddpdoctor.examine.equivalence import Against, equivalence
from ddpdoctor.examine.equivalence import compared as compared_by_runs
from ddpdoctor.launch.request import Device, Launch, RehearsalRequest
from tests.equivalence import against, cases, contrastive, correct, counted, own_data, sharded
from tests.equivalence.cases import Case
from tests.forks import rehearse

FACTOR_WITHIN = 0.02
SHARDED = (*sharded.FAULTS, *sharded.CORRECT, *against.FAULTS, *against.CORRECT)
_COUNTED = (*counted.FAULTS, *counted.CORRECT)
TABLE = (
    *cases.FAULTS,
    *correct.CORRECT,
    *_COUNTED,
    *contrastive.FAULTS,
    *contrastive.CORRECT,
    *own_data.FAULTS,
    *own_data.CORRECT,
    *(SHARDED if hasattr(torch.distributed.fsdp, "fully_shard") else ()),
)
"""Before torch 2.6 there is no ``fully_shard`` that is public."""


def compared(case: Case, *, forked: bool = True) -> EquivalenceSection:
    """Compare on two ranks; where they are not forked here, as the command does, with one process beside them."""
    with tempfile.TemporaryDirectory(prefix="equivalence-") as directory:
        script = Path(directory, "train.py")
        script.write_text(case.text(), encoding="utf-8")
        device: Device = "stand-in" if "cuda" in case.text() else "cpu"
        spawns = "mp.spawn(" in case.text()
        request = RehearsalRequest(
            script=script,
            arguments=case.arguments,
            launch=Launch(starter="python" if spawns else "torchrun", ranks=2),
            spawns_ranks=spawns,
            nproc=2,
            device=device,
            time_limit_s=900.0,
        )
        if not case.against:
            # Who asks for more ranks than a launcher has started does that in a real launch only.
            if forked and not spawns and "world_size=" not in case.text():
                return equivalence(request, rehearse)
            return compared_by_runs(request, lambda progress: None, 0.0, apart=True)
        launch = Launch(starter="torchrun", ranks=case.against_ranks)
        other = msgspec.structs.replace(request, arguments=case.against, launch=launch, nproc=case.against_ranks)
        return equivalence(request, rehearse, against=Against(f"torchrun train.py {' '.join(case.against)}", other))


def complaint(case: Case, section: EquivalenceSection) -> str:
    """What is wrong with what was said of a case; empty when it is right."""
    said = sentence(section)
    if not case.kind:
        if section.status == "differs":
            return f"a false alarm: {said}"
        if section.status == "inconclusive" and not case.may_be_unclear:
            return said
        return "" if case.says in said else f"does not say {case.says!r}: {said}"
    if section.status != "differs" or section.kind != case.kind:
        return f"not {case.kind} but {section.kind or section.status}: {said}"
    if case.factor is not None and abs((section.factor or 0.0) / case.factor - 1) > FACTOR_WITHIN:
        return f"not {case.factor} times: {said}"
    if case.modules and section.modules != case.modules:
        return f"names {section.modules}: {said}"
    lines = [case.text().splitlines()[line - 1] for _, _, line in section.places]
    if case.line and (bool(lines) is (case.line == "-") or any(case.line not in line for line in lines)):
        return f"names the lines {lines}: {said}"
    if case.ranks and section.at != case.ranks:
        return f"names ranks {section.at}: {said}"
    return "" if case.says in said else f"does not say {case.says!r}: {said}"
