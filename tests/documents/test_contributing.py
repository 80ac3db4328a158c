"""Each example of CONTRIBUTING.md is applied to a copy of the package, and does what the document says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents.blocks import Block, blocks_of

ROOT = Path(__file__).parents[2]
EXAMPLES = blocks_of(ROOT / "CONTRIBUTING.md")
IGNORED = shutil.ignore_patterns("__pycache__", "golden_files", "*.svg")

SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model, loader = torch.nn.Linear(2, 2), torch.utils.data.DataLoader([])
for inputs in loader:
    model(inputs).sum().backward()
    torch.cuda.empty_cache()
dist.destroy_process_group()
"""

GARBAGE = """
import gc
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
cells = [[number] for number in range(200_000)]
for step in range(60):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    gc.collect()
dist.destroy_process_group()
"""

SCREEN = """
import asyncio
from tests.demo.job import demo_snapshot
from tests.tui import runs
from tests.tui.screens import opened, text_of

async def main():
    async with opened(runs.Still(demo_snapshot(14_000_000_000, runs.NOW))) as (app, pilot):
        await pilot.press("7")
        await pilot.pause()
        print(text_of(app))

asyncio.run(main())
"""


class Copy:
    """A copy of the package with an example in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("ddpdoctor", "checks", "tui", "tests", "examples"):
            shutil.copytree(ROOT / name, root / name, symlinks=True, ignore=IGNORED)
        shutil.copy(ROOT / "pyproject.toml", root)

    def apply(self, section: str) -> list[str]:
        """Write the files and patches of a section, run its commands; the files that were touched."""
        touched: set[str] = set()
        for block in (block for block in EXAMPLES if block.section == section):
            touched |= self._apply(block)
        return sorted(touched)

    def _apply(self, block: Block) -> set[str]:
        if block.title:
            path = self.root / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
            return {block.title}
        if block.language == "diff":
            done = subprocess.run(
                ("git", "apply", "-"), cwd=self.root, input=block.text, text=True, capture_output=True
            )
            assert done.returncode == 0, done.stderr
            return {line.removeprefix("+++ b/") for line in block.text.splitlines() if line.startswith("+++ b/")}
        if block.language == "sh":
            for command in block.text.splitlines():
                if command.endswith("write_index") or "pytest" in command or "explain" in command:
                    self.run(*_words(command))
        return set()

    def run(self, *words: str, code: int = 0, cwd: Path | None = None) -> str:
        """Run our Python in the copy; what it printed."""
        done = subprocess.run(
            (sys.executable, *words),
            cwd=cwd or self.root,
            env={**os.environ, "PYTHONPATH": str(self.root), "XDG_STATE_HOME": str(self.root / "state")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr


def _words(command: str) -> list[str]:
    import shlex

    words = shlex.split(command)
    assert words[0] == "python"
    return words[1:]


@pytest.fixture
def copied(tmp_path: Path) -> Copy:
    return Copy(tmp_path / "copy")


def test_a_check_is_a_file_with_its_cases_and_its_finding_appears(copied: Copy, tmp_path: Path) -> None:
    touched = copied.apply("Add a check")
    assert {Path(name).parent.as_posix() for name in touched} == {"checks/speed"}
    (tmp_path / "train.py").write_text(SCRIPT)
    arguments = ("-m", "ddpdoctor", "check", "--static", "--output-format", "concise", "train.py")
    said = copied.run(*arguments, cwd=tmp_path)
    assert "train.py:9:5: advice DDP412 empty-cache-in-loop" in said
    assert "cache of the CUDA allocator" in copied.run("-m", "ddpdoctor", "explain", "DDP412")


def test_a_measure_with_its_check_touches_at_most_six_files_and_its_finding_appears(
    copied: Copy, tmp_path: Path
) -> None:
    touched = [*copied.apply("Add a gauge, and a check of runs that reads it"), "checks/index.json"]
    assert len(touched) <= 6
    copied.run("-m", "pytest", "-q", "tests/house/test_layout.py", "-k", "more_than_16_files")
    (tmp_path / "train.py").write_text(GARBAGE)
    said = copied.run("-m", "ddpdoctor", "profile", "--no-tui", "--nproc", "2", "train.py", cwd=tmp_path)
    assert "of its steps in the garbage collector" in said, said


def test_an_output_format_is_a_file_and_its_name(copied: Copy, tmp_path: Path) -> None:
    copied.apply("Add an output format")
    (tmp_path / "train.py").write_text(SCRIPT.replace("torch.cuda.empty_cache()", "print('done')"))
    arguments = ("-m", "ddpdoctor", "check", "--static", "--output-format", "mail")
    assert copied.run(*arguments, "train.py", cwd=tmp_path).startswith("Subject: train.py: clean")
    for _ in range(2):
        copied.run(*arguments, "-o", "report.txt", "train.py", cwd=tmp_path)


def test_a_screen_is_a_file_and_its_entry(copied: Copy) -> None:
    copied.apply("Add a screen")
    said = copied.run("-c", SCREEN)
    assert "7 Nodes" in said
    assert "slowest step" in said


def test_every_code_block_of_the_examples_is_executed() -> None:
    sections = {block.section for block in EXAMPLES if block.title or block.language == "diff"}
    assert sections == {
        "Add a check",
        "Add a gauge, and a check of runs that reads it",
        "Add an output format",
        "Add a screen",
    }
