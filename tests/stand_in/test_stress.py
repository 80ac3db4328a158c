"""What breaks under one injected cause is told apart from what breaks by itself; what does not break is silent."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from ddpdoctor.catalogue.run_checks import CheckResult
from ddpdoctor.checks import STANDS_FOR
from ddpdoctor.examination import RehearsalSection
from ddpdoctor.examine.one_script import Variant, noted, variants, with_variant
from ddpdoctor.finding import Finding, Location, Severity
from ddpdoctor.findings import merge
from tests.check_command import check

SCRIPT = """
import math, os, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def agreed(value):
    flag = torch.tensor(float(value)).cuda()
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return flag.item() > 0

def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.set_float32_matmul_precision("high")
    layers = nn.Sequential(nn.Linear(4, 8), nn.LAYER(8), nn.Linear(8, 2)).cuda()
    model = DDP(layers, device_ids=[local_rank], gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(SAMPLES, 4), torch.arange(SAMPLES) % 2)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=1, pin_memory=True)
    started = time.monotonic()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            batch, target = batch.cuda(non_blocking=True), target.cuda(non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(batch), target)
            if SKIPS:
                continue
            loss.backward()
            optimizer.step()
            if STOPS:
                break
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""
BREAKS = {
    "SAMPLES": "82",
    "LAYER": "BatchNorm1d",
    "SKIPS": "not math.isfinite(loss.item())",
    "STOPS": "time.monotonic() - started > 500",
}
HOLDS = {
    "SAMPLES": "84",
    "LAYER": "BatchNorm1d",
    "SKIPS": "agreed(not math.isfinite(loss.item()))",
    "STOPS": "agreed(time.monotonic() - started > 500)",
}


def check_with(directory: Path, parts: dict[str, str], *options: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON report."""
    text = textwrap.dedent(SCRIPT)
    for name, value in parts.items():
        text = text.replace(name, value)
    (directory / "train.py").write_text(text)
    return check(*options, "train.py", cwd=directory)


def test_a_script_that_holds_passes_the_thorough_rehearsal_in_silence(tmp_path: Path) -> None:
    code, report = check_with(tmp_path, HOLDS, "--thorough")
    assert (code, [one for one in report["findings"] if one["severity"] != "advice"]) == (0, [])
    notes = " ".join(report["rehearsal"]["notes"])
    assert all(f"rehearsed again {variant}: " in notes for variant in ("as 2x1", "under stress nan"))
    assert "under stress slow-rank0: it had nothing" not in notes and "short-batch: it had nothing" not in notes


def test_what_breaks_is_a_warning_that_names_the_cause(tmp_path: Path) -> None:
    code, report = check_with(tmp_path, BREAKS, "--stress", "all")
    assert code == 1
    under = {finding["stress"]: finding for finding in report["findings"] if finding["stress"]}
    assert {finding["severity"] for finding in report["findings"]} <= {"warning", "advice"}
    expected = {
        "nan": ("if one rank's loss is NaN: ", {"DDP302", "DDP312"}),
        "short-batch": ("if the last batch of a pass is short: ranks 0 and 1 raised ValueError", {"DDP706"}),
        "slow-rank0": ("if rank 0 is slow between two steps: ", {"DDP302", "DDP306", "DDP312", "DDP103"}),
    }
    assert under.keys() == expected.keys()
    for stress, (begins, codes) in expected.items():
        found = under[stress]
        assert found["severity"] == "warning" and found["code"] in codes and found["title"].startswith(begins)


def finding(code: str, severity: Severity, title: str = "rank 1 left") -> Finding:
    place = Location(file="train.py", line=7)
    return Finding(
        code=code,
        name="x",
        trouble=STANDS_FOR.get(code),
        severity=severity,
        title=title,
        locations=(place,),
        basis=frozenset({"rehearsal"}),
        remedy="do",
    )


def result(*findings: Finding, code: str = "DDP306") -> CheckResult:
    return CheckResult(code=code, name="x", from_run=findings)


def test_leaving_on_a_loss_that_is_no_number_is_a_decision() -> None:
    base, more = (result(),), (result(finding("DDP306", Severity.ERROR)),)
    for stress, severity in (("nan", Severity.ADVICE), ("short-batch", Severity.WARNING)):
        (extended,) = with_variant(base, more, Variant(stress=stress))  # type: ignore[arg-type]
        assert [one.severity for one in extended.from_run] == [severity]


def test_numbers_that_are_no_numbers_are_nobodys_fault_under_a_stress() -> None:
    base, more = (result(code="DDP208"),), (result(finding("DDP208", Severity.ERROR), code="DDP208"),)
    assert with_variant(base, more, Variant(stress="nan")) == base


def test_a_layout_adds_what_was_not_known_and_keeps_its_severity() -> None:
    known, new = finding("DDP501", Severity.ERROR), finding("DDP517", Severity.ERROR)
    base = (result(known, code="DDP501"), result(code="DDP517"))
    more = (result(known, code="DDP501"), result(new, code="DDP517"))
    extended = with_variant(base, more, next(variants((), thorough=True, spawns_ranks=False, nodes=1)))
    assert [one.from_run for one in extended] == [(known,), (new,)]


def test_an_injected_cause_takes_no_suspicion_of_another_with_it() -> None:
    seen = finding("DDP312", Severity.ADVICE)
    under = with_variant((result(),), (result(seen),), Variant(stress="nan"))[0].from_run
    source = frozenset({"source"})
    batch, clock = (
        Finding(
            code="DDP302",
            name="x",
            trouble="data-branch",
            severity=Severity.WARNING,
            title=f"`stop` asks the rank's own {what}",
            locations=seen.locations,
            basis=source,  # type: ignore[arg-type]
            remedy="do",
        )
        for what in ("batch", "clock")
    )
    merged = {one.stress: one for one in merge((batch, clock), under)}
    assert len(merged) == 2
    assert merged["nan"].severity == Severity.WARNING and merged["nan"].basis == {"rehearsal", "source"}
    assert merged[""].title == clock.title and merged[""].basis == source


def test_a_further_rehearsal_that_shows_nothing_makes_the_whole_inconclusive() -> None:
    first = RehearsalSection(status="completed", steps=8)
    slow = RehearsalSection(status="stopped", reason="the time limit was reached")
    told = noted(first, Variant(stress="nan"), slow, stressed=True, found=False)
    assert told.status == "stopped" and told.reason == "rehearsed again under stress nan: the time limit was reached"
    alike = RehearsalSection(status="failed", reason="ranks 0 and 1 raised FloatingPointError")
    assert noted(first, Variant(stress="nan"), alike, stressed=True, found=False).status == "completed"
    assert noted(first, Variant(stress="nan"), slow, stressed=False, found=False).status == "stopped"
