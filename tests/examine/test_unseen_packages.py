"""Packages that are not installed and whose values nobody looks at: the script is rehearsed without them."""

from __future__ import annotations

import builtins
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpdoctor.probe.rehearsal.pretend.other_packages import TAKES_ALL, StandIn, serve_imports, unseen_module
from ddpdoctor.probe.user_code import UserCode
from tests.check_command import check

TRAINING = """
IMPORT
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    net = torch.nn.Linear(4, 1)
    WRAP
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    SETUP
    for step in range(3):
        loss = model(torch.randn(8, 4)).mean()
        LOSS
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        STEP
    END
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""


def rehearsal(tmp_path: Path, files: dict[str, str] | None = None, **parts: str) -> dict[str, Any]:
    text = TRAINING
    for part in ("IMPORT", "WRAP", "SETUP", "LOSS", "STEP", "END"):
        text = text.replace(part, parts.get(part.lower(), "pass"))
    for name, source in {**(files or {}), "train.py": text}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    report: dict[str, Any] = check("--time-limit", "240", "train.py", cwd=tmp_path)[1]["rehearsal"]
    return report


ZOO = {
    "zoo/__init__.py": "from .large import *\nfrom . import small\n",
    "zoo/large.py": "import nobodys_models as m\nclass Large(m.Base):\n    size: m.T | None = None\n",
    "zoo/small.py": "from nobodys_layers.drop import Drop\n@Drop.register(Drop.__name__)\ndef small():\n    pass\n",
    "helpers.py": "import nobodys_help\n",
}
DRAWS = """import nobodys_plots.figures as figures
    figures.rcParams["size"] = 3
    figures.subplots(2).plot([1.0], label=f"{figures.title:.3f}")
"""
AVERAGES = """ema.update(model)
        with ema.on(step) as inner:
            inner.note(isinstance(3, nobodys_ema.A))
        logger.bind(rank=0).info("loss {}", loss.item())
"""
TAKES = {
    "import": "import zoo, importlib, nobodys_ema\nimportlib.import_module('helpers')\nfrom nobodys_log import logger",
    "setup": "ema = nobodys_ema.Average(model, 0.9)",
    "step": AVERAGES.strip(),
    "end": DRAWS.strip(),
}


def test_packages_that_nobody_looks_into_do_not_end_a_rehearsal(tmp_path: Path) -> None:
    shown = rehearsal(tmp_path, ZOO, **TAKES)
    assert (shown["status"], shown["steps"]) == ("completed", 3), shown
    for package in ("ema", "help", "layers", "log", "models", "plots"):
        assert f"pretended: nobodys_{package} (takes everything and gives nothing)" in shown["notes"]
    assert any("nobodys_models is not installed; rehearsed again without" in note for note in shown["notes"])


def test_a_package_whose_values_are_used_is_missed_and_named_with_all_others(tmp_path: Path) -> None:
    files = {"late.py": "import nobodys_z\n", "requirements.txt": "nobodys-a-core\nnobodys-a-colours>1\nnobodys_rest\n"}
    imports = "import nobodys_a, importlib\nimportlib.import_module('late')"
    shown = rehearsal(tmp_path, files, **{"import": imports, "wrap": "net = nobodys_a.create('resnet')"})
    assert (shown["status"], shown["steps"]) == ("failed", 0), shown
    assert "train.py:2: No module named 'nobodys_a'" in shown["reason"]
    assert "`pip install nobodys-a-core nobodys_z nobodys-a-colours` for the Python" in shown["hint"]
    (note,) = shown["notes"]
    assert "without the packages that are missing, which does not work for this script: ranks 0 and 1 raised" in note


package = unseen_module("nobodys_a")


@pytest.mark.parametrize(
    "look",
    [
        lambda loss: package.Loss()(loss),
        lambda loss: loss + package.penalty(),
        lambda loss: package.penalty() * 2,
        lambda loss: package.loaders(8, [loss]),
        lambda loss: [print(one) for one in package.files()],
        lambda loss: 1 if package.options().large else 0,
        lambda loss: package.options().steps > 3,
        lambda loss: package.NAME == "small",
        lambda loss: torch.zeros(package.WIDTH),
        lambda loss: torch.nn.Sequential(package.Layer()),
        lambda loss: Path(package.path()),
        lambda loss: list(package.parameters()),
        lambda loss: "a" in package.names,
        lambda loss: float(package.rate),
        lambda loss: torch.relu(package.features(3)),
        lambda loss: torch.optim.SGD(package.Net().parameters(), lr=0.1),
    ],
)
def test_who_looks_at_what_a_package_gives_misses_it(look: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(
        (ModuleNotFoundError, TypeError), match=r"No module named 'nobodys_a'|not a Module subclass|must be"
    ):
        look(torch.ones(1, requires_grad=True).sum())


@pytest.mark.parametrize(
    "guard",
    [
        "try:\n    import nobodys_fast\nexcept ImportError:\n    nobodys_fast = None",
        "try:\n    import helpers_of_guards\nexcept Exception:\n    nobodys_fast = None",
        "import contextlib\nnobodys_fast = None\nwith contextlib.suppress(ImportError):\n    import nobodys_fast",
    ],
)
def test_a_package_whose_absence_the_script_handles_stays_absent(
    guard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "helpers_of_guards.py").write_text("import nobodys_fast\n")
    (tmp_path / "guards.py").write_text(f"{guard}\nimport nobodys_plots\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(builtins, "__import__", builtins.__import__)
    noted: list[str] = []
    serve_imports({}, UserCode(str(tmp_path)), noted.append, StandIn(unseen_module, TAKES_ALL))
    module = runpy.run_path(str(tmp_path / "guards.py"))
    assert module["nobodys_fast"] is None and noted == [f"nobodys_plots ({TAKES_ALL})"]


def test_what_is_of_the_project_is_not_pretended(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    files = {"src/own_tools/__init__.py": "def note():\n    return 1\n"}
    shown = rehearsal(tmp_path, files, **{"import": "import own_tools", "end": "own_tools.note()"})
    assert (shown["status"], shown["steps"]) == ("failed", 0), shown
    assert "PYTHONPATH=src" in shown["hint"] and shown["notes"] == []
