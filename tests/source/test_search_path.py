"""Modules in directories that a script adds to ``sys.path``."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.errors import UsageError
from ddpdoctor.source.script.project import find_main
from ddpdoctor.source.script.script import read_script
from tests.source.marked import check_marks, written

WAYS = {
    "file": "import os\nsys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))",
    "variables": "here = os.path.dirname(__file__)\nlib = os.path.join(here, '..', 'lib')\nsys.path.insert(0, lib)",
    "split": "root = os.path.split(os.path.abspath(os.path.dirname(__file__)))[0]\nsys.path.append(root + '/lib')",
    "pathlib": "from pathlib import Path\nsys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'lib'))",
    "parent": "from pathlib import Path\nsys.path.append(str(Path(__file__).parent.parent.joinpath('lib')))",
    "relative": "sys.path.append('../lib')",
    "working directory": "sys.path.append(os.path.join(os.getcwd(), 'lib'))",
    "list": "sys.path += [os.path.join(os.path.dirname(__file__), os.pardir, 'lib')]",
    "extend": "sys.path.extend(['lib', 'elsewhere'])",
    "function": "def add(path):\n    if path not in sys.path:\n        sys.path.insert(0, path)\nadd('lib')",
    "site": "import site\nsite.addsitedir('lib')",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_directory_that_the_script_adds_is_looked_into(tmp_path: Path, way: str) -> None:
    (tmp_path / ".git").mkdir()
    written(tmp_path, "", name="lib/engine.py", head="")
    script = read_script(written(tmp_path, f"{WAYS[way]}\nimport engine\n", name="tools/train.py"))
    assert [module.name for module in script.modules] == ["__main__", "engine"]


def test_a_module_adds_a_directory_for_those_after_it(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    written(tmp_path, "", name="lib/engine.py", head="")
    head = "import os\nimport sys\n"
    written(
        tmp_path, "sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))\n", "tools/_paths.py", head
    )
    script = read_script(written(tmp_path, "import _paths\nimport engine\n", name="tools/train.py", head=""))
    assert [module.name for module in script.modules] == ["__main__", "_paths", "engine"]


@pytest.mark.parametrize(
    "line",
    [
        "sys.path.append(os.environ['LIB'])",
        "sys.path.append('missing')",
        "path = 'lib'\npath = find()\nsys.path.append(path)",
        "path = path + 'lib'\nsys.path.append(path)",
        "sys.path.remove('lib')",
        "print('sys.path', 'lib')",
    ],
)
def test_what_the_text_does_not_say_is_not_guessed(tmp_path: Path, line: str) -> None:
    (tmp_path / ".git").mkdir()
    written(tmp_path, "", name="lib/engine.py", head="")
    script = read_script(written(tmp_path, f"{line}\nimport engine\n", name="tools/train.py"))
    assert len(script.modules) == 1


def test_a_package_that_the_script_lies_in_is_found_by_its_name(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    written(tmp_path, "", name="old/half/__init__.py", head="")
    written(tmp_path, "", name="old/half/model.py", head="")
    script = read_script(written(tmp_path, "from half.model import net\n", name="old/half/train.py", head=""))
    assert "half.model" in [module.name for module in script.modules]


def test_a_variable_of_a_module_is_set_from_outside(tmp_path: Path) -> None:
    ranks = """
        import torch.distributed as dist

        GROUP = None


        def local_rank():
            if GROUP is None:
                raise ValueError("no group")
            return dist.get_rank(group=GROUP)
        """
    written(tmp_path, ranks, name="ranks.py", head="")
    script = """
        import ranks

        dist.init_process_group("nccl")
        ranks.GROUP = dist.new_group([0, 1, 2, 3])
        model = DDP(nn.Linear(4, 4).cuda(), device_ids=[ranks.local_rank()])
        data = TensorDataset(torch.zeros(8, 4))
        loader = DataLoader(data, sampler=DistributedSampler(data))  # DDP102
        for epoch in range(10):
            for (batch,) in loader:
                model(batch).sum().backward()
        dist.destroy_process_group()
        """
    check_marks(tmp_path, script, "DDP102")


@pytest.mark.parametrize("started_in", ["", "scripts", "elsewhere"])
def test_modules_of_the_working_directory_above_the_script_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started_in: str
) -> None:
    """``PYTHONPATH=. torchrun scripts/train.py`` in a project that no project file marks."""
    written(tmp_path, "", name="lib/engine.py", head="")
    path = written(tmp_path, "from lib import engine\n", name="scripts/train.py")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / started_in)
    expected = ["__main__", "lib.engine"] if not started_in else ["__main__"]
    assert [module.name for module in read_script(path).modules] == expected


ABOVE = {
    "a package": ("speech/bin/train.py", "speech/utils.py", "from speech.utils import save"),
    "a package with its file": ("speech/train.py", "speech/parts/saving.py", "import speech.parts.saving"),
    "a directory of the job": ("code/training/run.py", "code/training/loop.py", "from training.loop import save"),
    "what stands beside it": (
        "code/training/run.py",
        "code/metrics.py",
        "import training.run_options\nimport metrics",
    ),
    "deep inside": ("a/b/c/train.py", "a/b/shared.py", "from a.b import shared"),
}


@pytest.mark.parametrize("way", ABOVE)
def test_a_script_that_imports_from_the_package_it_lies_in_is_started_above_of_it(tmp_path: Path, way: str) -> None:
    entry, module, imports = ABOVE[way]
    written(tmp_path, "", name=module, head="")
    written(tmp_path, "", name="code/training/run_options.py", head="")
    script = read_script(written(tmp_path, f"{imports}\n", name=entry))
    assert tmp_path / module in [one.path for one in script.modules]


def test_a_directory_above_that_the_script_does_not_import_from_is_not_its_own(tmp_path: Path) -> None:
    written(tmp_path, "", name="metrics.py", head="")
    script = read_script(written(tmp_path, "import metrics\n", name="code/training/run.py"))
    assert [module.name for module in script.modules] == ["__main__"]


@pytest.mark.parametrize(
    ("place", "imports", "found"),
    [
        ("detector-main/train.py", "from detector.parts.model import Net", True),
        ("owner+detector@859e25ad/train.py", "import detector.parts.model as model", True),
        ("Detector-0.2/tools/train.py", "from detector.parts import model", True),
        ("src-main/train.py", "from src.parts import model", False),
        ("detectors/train.py", "from detector.parts import model", False),
        ("detector-main/train.py", "from torch.parts import model", False),
    ],
)
def test_a_repository_that_is_its_package_is_found_in_a_copy_of_a_longer_name(
    tmp_path: Path, place: str, imports: str, found: bool
) -> None:
    root = tmp_path / place.partition("/")[0]
    for name in ("parts/__init__.py", "parts/model.py"):
        written(root, "", name=name, head="")
    (root / ".git").mkdir()
    script = read_script(written(tmp_path, f"{imports}\n", name=place))
    assert (root / "parts" / "model.py" in [one.path for one in script.modules]) is found


def test_a_module_that_lies_below_is_answered_with_the_path_that_finds_it(tmp_path: Path) -> None:
    written(tmp_path, "", name="src/job/train.py", head="")
    written(tmp_path, "", name="tools/other.py", head="")
    for name, hint in (
        ("job.train", "src/job/train.py is here: put `PYTHONPATH=src` before the command"),
        ("other", "tools/other.py is here: put `PYTHONPATH=tools` before the command"),
        ("job.nowhere", "Run it from the directory that `python -m` is run from"),
    ):
        with pytest.raises(UsageError, match="there is no such module") as raised:
            find_main(name, [tmp_path])
        assert raised.value.hint.startswith(hint)
