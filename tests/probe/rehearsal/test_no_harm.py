"""A fault of ours inside a rank costs evidence, never the training, and never passes for clean."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.examine.one_script import ExamineRequest, examine

from .conftest import HEAD

TRAINING = """
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4))
sampler = DistributedSampler(data)
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in DataLoader(data, batch_size=4, sampler=sampler):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
dist.barrier()
dist.destroy_process_group()
if sampler.rank == 0:
    print("trained to the end")
"""

FAULTS = {
    "collectives": ("_ddpdoctor.probe.rehearsal.collective_hook", "origin_of"),
    "wrap": ("_ddpdoctor.probe.observed", "_describe"),
    "forward": ("_ddpdoctor.probe.rehearsal.training.ddp_modules", "leaves"),
    "gradients": ("_ddpdoctor.probe.rehearsal.training.ddp_modules", "Modules._close"),
    "pass": ("_ddpdoctor.probe.rehearsal.data.loaders", "Loaders._length"),
    "indices": ("_ddpdoctor.probe.rehearsal.data.loaders", "base_indices"),
}
"""Module and name of what raises when it is called."""
PLANT = """
import importlib
*owners, name = "{name}".split(".")
owner = importlib.import_module("{module}")
for each in owners:
    owner = getattr(owner, each)
assert callable(getattr(owner, name)), "there is nothing of that name any more"
setattr(owner, name, None)
"""


@pytest.mark.parametrize("part", FAULTS)
def test_training_goes_on_and_the_verdict_is_inconclusive(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = FAULTS[part]
    (tmp_path / "train.py").write_text(HEAD + PLANT.format(module=module, name=name) + TRAINING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    examination = examine(ExamineRequest(target="train.py", time_limit_s=180.0))
    assert examination.rehearsal.steps >= 4
    assert not examination.findings
    assert (examination.exit_code, examination.complete) == (3, False), examination.rehearsal
    assert any("observation failed" in note for note in examination.rehearsal.notes)
