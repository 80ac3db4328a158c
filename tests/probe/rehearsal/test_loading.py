"""What the ranks train on, seen in real rehearsals: shared, sharded, uneven, joined, random."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.examine.one_script import ExamineRequest, examine

from .conftest import HEAD, Rehearse

TRAINING = """
class Images(torch.utils.data.Dataset):
    def __init__(self):
        self.images = torch.arange(400.0).view(100, 4)
    def __len__(self):
        return 100
    def __getitem__(self, index):
        return SAMPLE

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(SEED)
data = Images()
loader = LOADER
schedule = torch.zeros(len(loader))
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
CONTEXT
    for epoch in range(2):
        for index, x in enumerate(loader):
            schedule[index] = 1
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""
PLAIN = {"SAMPLE": "self.images[index]", "SEED": "rank", "LOADER": "DataLoader(data, 5)", "CONTEXT": "if True:"}
OWN_PART = "DataLoader(torch.utils.data.Subset(data, range(rank, 100, 2)), 5, shuffle=True)"
AUGMENTED = "self.images[index] + torch.rand(1)"

CASES = {
    "no sampler": ({}, ["DDP101"]),
    "no sampler, all of it augmented": (
        {"SAMPLE": AUGMENTED, "LOADER": "DataLoader(data, 5, shuffle=True)"},
        ["DDP101"],
    ),
    "a sampler with a fixed rank": (
        {"LOADER": "DataLoader(data, 5, sampler=DistributedSampler(data, num_replicas=2, rank=0, shuffle=False))"},
        ["DDP517"],
    ),
    "a sampler within an Accelerator's": (
        {
            "LOADER": "__import__('accelerate').Accelerator(cpu=True).prepare_data_loader("
            "DataLoader(data, 5, sampler=DistributedSampler(data, shuffle=False)))"
        },
        ["DDP108"],
    ),
    "a loader that an Accelerator divides": (
        {
            "LOADER": "__import__('accelerate').Accelerator(cpu=True).prepare_data_loader("
            "DataLoader(data, 5, sampler=torch.utils.data.SequentialSampler(range(50))))"
        },
        [],
    ),
    "a part for each rank": ({"LOADER": OWN_PART}, []),
    "noise that the index does not determine": ({"SAMPLE": "torch.rand(4)"}, []),
    "uneven": (
        {"LOADER": "DataLoader(torch.utils.data.Subset(data, range(50 * rank, 70 + 30 * rank)), 5)"},
        ["DDP103"],
    ),
    "uneven under join": (
        {
            "LOADER": "DataLoader(torch.utils.data.Subset(data, range(50 * rank, 70 + 30 * rank)), 5)",
            "CONTEXT": "with model.join():",
        },
        [],
    ),
}
WITHOUT_LOADER = """
dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


def _codes(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (folder / "train.py").write_text(HEAD + text)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    examination = examine(ExamineRequest(target="train.py", time_limit_s=180.0))
    assert examination.rehearsal.status in ("completed", "stopped"), examination.rehearsal
    assert examination.exit_code == (1 if examination.findings else 0), examination.outcomes
    return [finding.code for finding in examination.findings if "rehearsal" in finding.basis]


@pytest.mark.parametrize("case", CASES)
def test_loaders(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, expected = CASES[case]
    text = TRAINING
    for name, value in {**PLAIN, **changes}.items():
        text = text.replace(name, value)
    assert _codes(text, tmp_path, monkeypatch) == expected


@pytest.mark.parametrize(("seed", "expected"), [("7", ["DDP101"]), ("7 + dist.get_rank()", [])])
def test_batches_without_a_loader(
    seed: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _codes(WITHOUT_LOADER.replace("SEED", seed), tmp_path, monkeypatch) == expected


def test_a_rank_that_was_spawned_spawns_workers_for_the_first_pass_of_a_loader_only(
    rehearse_script: Rehearse,
) -> None:
    record = rehearse_script(
        """
        import torch.multiprocessing as mp
        class Noise(torch.utils.data.Dataset):
            def __len__(self):
                return 24
            def __getitem__(self, index):
                with open(f"drawn-by-{os.getpid()}", "a") as file:
                    print(index, file=file)
                return torch.rand(4)
        def work(rank, size):
            dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"file://{os.path.abspath('store')}")
            data = Noise()
            loader = DataLoader(data, 3, num_workers=2, sampler=DistributedSampler(data))
            model = DDP(nn.Linear(4, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for epoch in range(3):
                loader.sampler.set_epoch(epoch)
                for x in loader:
                    optimizer.zero_grad()
                    model(x).sum().backward()
                    optimizer.step()
                assert loader.num_workers == 2
            dist.barrier()
            fetched_here = os.path.exists(f"drawn-by-{os.getpid()}")
            dist.destroy_process_group()
            assert fetched_here
        if __name__ == "__main__":
            mp.spawn(work, args=(2,), nprocs=2)
            assert len([name for name in os.listdir(".") if name.startswith("drawn-by-")]) == 4
        """,
        spawns_ranks=True,
    )
    assert [(rank.end, rank.exceptions) for rank in record.ranks] == [("finished", ())] * 2
    assert record.job.stop_reason == "", record.job.stop_text
    # The job's random numbers are those of its workers, and a rank that fetches in their place does not tell its own.
    assert {state.worker for state in record.random_states} == {0}
