from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.projection import project
from ddpdoctor.source.script.script import Script, read_script
from tests.source.marked import findings_of

CORRECT = Path(__file__).parent / "correct"
TESTS = Path(__file__).parents[1]
REHEARSED = sorted(path for table in ("idioms", "stand_in") for path in (TESTS / table / "scripts").glob("**/*.py"))
"""What the tables rehearse by hand; here they are read in every run."""
SCRIPTS = sorted(CORRECT.glob("*.py"))


def without_advice(script: Script) -> list[Finding]:
    """What is wrong with a script; what could be better is no matter here."""
    return [finding for finding in findings_of(script) if finding.severity is not Severity.ADVICE]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(CORRECT)))
def test_a_correct_script_has_no_finding(path: Path) -> None:
    script = read_script(path)
    assert [(finding.code, finding.locations[0].line, finding.title) for finding in without_advice(script)] == []
    projection = project(script)
    assert not projection.bound
    assert any(event.kind == "backward" and event.loops for event in projection.events)


@pytest.mark.parametrize("path", REHEARSED, ids=lambda path: str(path.relative_to(TESTS)))
def test_a_script_that_is_rehearsed_in_silence_has_no_finding_in_its_source(path: Path) -> None:
    assert [(found.code, found.locations[0].line, found.title) for found in without_advice(read_script(path))] == []


DEFECTS = {
    "no sampler": (
        "torchrun_epochs.py",
        "batch_size=batch_size, sampler=sampler, num",
        "batch_size=batch_size, shuffle=train, num",
        [
            (
                "DDP101",
                "return DataLoader(dataset, batch_size=batch_size, shuffle=train, num_workers=2, pin_memory=True)",
            )
        ],
    ),
    "no set_epoch": (
        "torchrun_epochs.py",
        "    loader.sampler.set_epoch(epoch)\n",
        "",
        [
            (
                "DDP102",
                "return DataLoader(dataset, batch_size=batch_size, sampler=sampler, num_workers=2, pin_memory=True)",
            )
        ],
    ),
    "barrier on rank 0": (
        "torchrun_epochs.py",
        "    dist.barrier()\n",
        "        dist.barrier()\n",
        [("DDP301", "dist.barrier()")],
    ),
    "save on all ranks": (
        "torchrun_epochs.py",
        "    if dist.get_rank() == 0:\n        state",
        "    if epoch >= 0:\n        state",
        [("DDP601", 'torch.save(state, path + ".tmp")')],
    ),
    "no sampler in a spawned trainer": (
        "spawned_trainer.py",
        "shuffle=False, sampler=DistributedSampler(dataset)",
        "shuffle=True",
        [("DDP101", "return DataLoader(")],
    ),
    "no set_epoch in a spawned trainer": (
        "spawned_trainer.py",
        "        self.train_data.sampler.set_epoch(epoch)\n",
        "",
        [("DDP102", "return DataLoader(")],
    ),
    "one rank validates with collectives": (
        "accumulation.py",
        "        value = validate(model, val_loader, device)\n",
        "        value = validate(model, val_loader, device) if is_main else 0.0\n",
        [("DDP301", "dist.all_reduce(tensor)"), ("DDP302", "if patience == 3:")],
    ),
    "one rank stops": (
        "accumulation.py",
        "        if patience == 3:\n",
        "        if is_main and patience == 3:\n",
        [("DDP301", "scaler.scale(loss / ACCUMULATION).backward()")],
    ),
    "global rank as device": (
        "random_batches.py",
        'device = f"cuda:{ddp_local_rank}"',
        'device = f"cuda:{ddp_rank}"',
        [("DDP501", "torch.cuda.set_device(device)")],
    ),
    "skipped backward": (
        "random_batches.py",
        "        loss.backward()\n",
        "        if not (ddp_rank == 1 and iteration == 40):\n            loss.backward()\n",
        [("DDP301", "loss.backward()")],
    ),
}


@pytest.mark.parametrize(("name", "right", "wrong", "expected"), DEFECTS.values(), ids=DEFECTS)
def test_one_defect_in_a_correct_script_is_found_alone(
    tmp_path: Path, name: str, right: str, wrong: str, expected: list[tuple[str, str]]
) -> None:
    text = (CORRECT / name).read_text()
    assert right in text
    path = tmp_path / name
    path.write_text(text.replace(right, wrong, 1))
    lines = path.read_text().splitlines()
    found = without_advice(read_script(path))
    assert [(finding.code, lines[finding.locations[0].line - 1].strip()) for finding in found] == expected
