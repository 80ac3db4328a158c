"""What a command has imported at its end, in a process of its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "textual", "psutil", "pynvml", "numpy")
PROBE = """
import sys
from ddpdoctor.cli.main import main
code = main(sys.argv[1:])
print(code, *sorted(sys.modules), file=sys.stderr)
"""

HEALTHY = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import os
def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = DDP(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            opt.step()
    dist.destroy_process_group()
if __name__ == "__main__":
    main()
"""

SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
dist.destroy_process_group()
"""


def imported(script: str, arguments: tuple[str, ...], directory: Path) -> list[str]:
    """The modules that a command has imported when it has examined a script."""
    (directory / "train.py").write_text(script)
    done = subprocess.run(
        (sys.executable, "-c", PROBE, *arguments),
        cwd=directory,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )
    code, *modules = done.stderr.splitlines()[-1].split()
    assert code == "0", done.stderr
    return modules


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (("--version",), (*HEAVY, "rich")),
        (("--help",), (*HEAVY, "rich")),
        (("explain",), (*HEAVY, "rich")),
        (("check", "--static", "train.py"), HEAVY),
        (("check", "--static", "--output-format", "json", "train.py"), (*HEAVY, "rich")),
        (("check", "--static", "--output-format", "concise", "train.py"), (*HEAVY, "rich")),
    ],
    ids=" ".join,
)
def test_a_quick_command_imports_nothing_heavy(
    arguments: tuple[str, ...], absent: tuple[str, ...], tmp_path: Path
) -> None:
    assert set(absent) & set(imported(SCRIPT, arguments, tmp_path)) == set()


@pytest.mark.parametrize(
    ("arguments", "most", "reads_sources"),
    [
        (("--help",), 12, False),
        (("explain",), 28, False),
        (("explain", "DDP101"), 21, False),
        (("check", "--static", "train.py"), 126, True),
    ],
    ids=str,
)
def test_a_quick_command_imports_few_modules_of_ours(
    arguments: tuple[str, ...], most: int, reads_sources: bool, tmp_path: Path
) -> None:
    """``most`` only ever gets smaller: one part of a module that a command needs is no reason to import five others."""
    modules = [name for name in imported(HEALTHY, arguments, tmp_path) if name.partition(".")[0] == "ddpdoctor"]
    assert len(modules) <= most, modules
    assert any(module.startswith("ddpdoctor.source") for module in modules) is reads_sources


def test_the_package_itself_imports_nothing() -> None:
    names = "sorted(set(sys.modules) - before - {'ddpdoctor'})"
    done = subprocess.run(
        (sys.executable, "-c", f"import sys; before = set(sys.modules); import ddpdoctor; print({names})"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() in ("[]", "['__future__']")


def test_the_plugin_imports_the_standard_library_and_pytest_only() -> None:
    """It is loaded into every pytest of an environment, also where nobody uses it."""
    probe = """
import pytest, sys
pytest.main(["--version", "-p", "no:ddpdoctor"])
before = set(sys.modules)
import ddpdoctor.testing.plugin
new = set(sys.modules) - before
print(sorted(name for name in new if name.partition(".")[0] not in sys.stdlib_module_names))
"""
    done = subprocess.run((sys.executable, "-c", probe), cwd=ROOT, capture_output=True, text=True, check=True)
    ours = ["ddpdoctor", "ddpdoctor.testing", "ddpdoctor.testing.plugin"]
    assert ast.literal_eval(done.stdout.splitlines()[-1]) == ours


def test_public_functions_stand_where_submodules_have_the_same_name() -> None:
    probe = """
import ddpdoctor, ddpdoctor.examine.one_script
from ddpdoctor.check import Check
print(callable(ddpdoctor.check), callable(ddpdoctor.watch), sorted(set(ddpdoctor.__all__) - set(dir(ddpdoctor))))
assert all(getattr(ddpdoctor, name) is not None for name in ddpdoctor.__all__)
"""
    done = subprocess.run((sys.executable, "-c", probe), cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True True []"
