"""``ddpdoctor check`` from the shell on the bundled examples and on a user's directory."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import psutil
import pytest

from tests.acceptance.examples import EXAMPLES
from tests.check_command import check

ROOT = Path(__file__).parents[2]
TRAINING = """
import os, shutil, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if dist.get_rank() == 0:
    AT_THE_START
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).mean().backward()
    optimizer.step()
if dist.get_rank() == 0:
    AT_THE_END
dist.barrier()
dist.destroy_process_group()
"""
SAVE = "torch.save(model.module.state_dict(), 'runs/TMP')"
HABITS = {
    "resume from the newest, save beside it, load and remove that": (
        "print(max(Path('runs').glob('ckpt_*')).read_bytes())",
        SAVE.replace("TMP", "ckpt_3.pt")
        + "; os.path.getsize('runs/ckpt_3.pt')"
        + "; torch.load('runs/ckpt_3.pt'); os.remove('runs/ckpt_3.pt')",
        0,
    ),
    "atomic save over an old checkpoint": (
        "pass",
        SAVE.replace("TMP", "new.tmp") + "; os.replace('runs/new.tmp', 'runs/ckpt_2.pt')",
        3,
    ),
    "rmtree at the start": ("shutil.rmtree('runs')", "pass", 3),
}
"""At the start, at the end, exit code under the rules; ``tests/probe/no_touch`` has the others without a rehearsal."""


def tree(directory: Path) -> dict[str, str]:
    """Digest of every file and directory below a directory."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "directory"
        for path in sorted(directory.rglob("*"))
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_gives_its_own_finding_and_no_other(name: str, tmp_path: Path) -> None:
    code, verdict, status, findings = EXAMPLES[name]
    exit_code, report = check(str(ROOT / "examples" / name), cwd=tmp_path)
    found = [(finding["code"], finding["severity"], sorted(finding["basis"])) for finding in report["findings"]]
    assert found == findings
    assert (exit_code, report["exit_code"], report["verdict"]) == (code, code, verdict)
    assert report["rehearsal"]["status"] == status
    assert report["complete"] == (status == "completed")
    assert len({outcome["code"] for outcome in report["outcomes"]}) == len(report["outcomes"]) >= 14
    assert list(tmp_path.iterdir()) == []
    assert not [
        child for child in psutil.Process().children(recursive=True) if "ddpdoctor" in " ".join(child.cmdline())
    ]


def test_the_hang_is_proved_within_5_seconds_of_the_start_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddpdoctor.launch.request import RehearsalRequest
    from ddpdoctor.monitor.rehearsal import rehearse

    monkeypatch.chdir(tmp_path)
    record = rehearse(RehearsalRequest(script=ROOT / "examples" / "rank_divergent_hang.py"), lambda progress: None)
    assert record.job.stop_reason == "proof"
    began_ns = min(track.started_ns[0] for track in record.collectives)
    assert 0 < record.job.ended_ns - began_ns < 5e9
    stacks = {stack.rank: stack for stack in record.stacks if stack.main}
    assert set(stacks) == {0, 1}, "both ranks' stacks are in the record"


@pytest.mark.parametrize("mode", ["--overlay", "--no-overlay"])
@pytest.mark.parametrize("habit", HABITS)
def test_the_users_tree_is_the_same_afterwards(habit: str, mode: str, tmp_path: Path) -> None:
    start, end, expected = HABITS[habit]
    (tmp_path / "train.py").write_text(TRAINING.replace("AT_THE_START", start).replace("AT_THE_END", end))
    (tmp_path / "runs").mkdir()
    for name in ("ckpt_1.pt", "ckpt_2.pt", "best.pt"):
        (tmp_path / "runs" / name).write_bytes(name.encode() * 100)
    before = tree(tmp_path)
    exit_code, report = check(mode, "train.py", cwd=tmp_path)
    assert tree(tmp_path) == before
    if mode == "--overlay" and report["rehearsal"]["overlay"]:
        expected = 0  # it goes on, whatever it overwrites
    assert exit_code == expected, report["rehearsal"]
    if expected == 3:
        assert "train.py:" in report["rehearsal"]["reason"] and "--allow-writes" in report["rehearsal"]["hint"]


def test_the_tool_and_torch_may_live_in_different_environments(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "tool")], check=True)
    tool = tmp_path / "tool" / "bin" / "python"
    ask = [str(tool), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site_packages = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    ours = Path(sysconfig.get_path("purelib"))
    compiled = [path.name for path in ours.glob("*__mypyc*.so")]  # Of tomli, which Python 3.10 needs.
    for package in ("click", "msgspec", "psutil", "pynvml.py", "tomli", *compiled):
        source = ours / package
        if source.exists():
            (site_packages / package).symlink_to(source)
    assert subprocess.run([tool, "-c", "import torch"], capture_output=True).returncode != 0
    assert importlib.util.find_spec("torch") is not None
    script = str(ROOT / "examples" / "healthy.py")
    named, report = check("--python", sys.executable, script, cwd=tmp_path, python=str(tool))
    assert (named, report["rehearsal"]["status"]) == (0, "completed"), report["rehearsal"]
    active = {"VIRTUAL_ENV": "", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    found, report = check(script, cwd=tmp_path, python=str(tool), **active)
    assert (found, report["rehearsal"]["status"]) == (0, "completed"), report["rehearsal"]
