"""A missing module: all that the script lacks, by the names of packages, or where the project has it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ddpdoctor.examine.hints import hint_for
from ddpdoctor.examine.missing_modules import module_hint
from ddpdoctor.record.model import RankException
from ddpdoctor.source.script.script import Script, read_script


def written(files: dict[str, str], at: Path) -> Script:
    for name, text in files.items():
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).write_text(text)
    return read_script(at / "train.py")


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ({"train.py": "import nobodys_a\nimport data\n", "data.py": "import nobodys_b.c\n"}, "nobodys_a nobodys_b"),
        ({"train.py": "import nobodys_a\nimport wandb\nimport os, sys, torch\n"}, "nobodys_a"),
        ({"train.py": "import nobodys_a\ntry:\n    import nobodys_b\nexcept ImportError:\n    pass\n"}, "nobodys_a"),
        ({"train.py": "import nobodys_a\ndef late():\n    import nobodys_b\n"}, "nobodys_a"),
        ({"train.py": "import nobodys_a\nimport net.c\n", "net/__init__.py": "import nobodys_z\n", "net/c.py": ""},
         "nobodys_a nobodys_z"),
        ({"train.py": "import nobodys_a\ndef f():\n    import late\n", "late.py": "import nobodys_b\n"}, "nobodys_a"),
        ({"train.py": "import nobodys_a, nobodys_b\n", "requirements.txt": "nobodys-b-core>=1\nnobodys_a\n"},
         "nobodys_a nobodys-b-core"),
        ({"train.py": "import nobodys_a\n", "pyproject.toml": '[project]\nx = ["nobodys-a-python >= 2", "torch"]\n'},
         "nobodys-a-python"),
        ({"train.py": "import nobodys_a\n", "docs/README.md": "First `pip install nobodys-a-next numpy`.\n"},
         "nobodys-a-next"),
        ({"train.py": "import nobodys_a\n", "requirements.txt": "other-nobodys_a\nnobodys_a==1\n"}, "nobodys_a"),
    ],
)  # fmt: skip
def test_all_that_the_script_lacks_is_named_at_once(
    files: dict[str, str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = written(files, tmp_path)
    assert f"`pip install {line}` for the Python" in module_hint("nobodys_a", str(tmp_path), script, sys.executable)


@pytest.mark.parametrize(
    ("files", "start", "hint"),
    [
        (("own_a/__init__.py", "setup.py"), ".", "install it (`pip install -e .`)"),
        (("own_a/__init__.py", "scripts/train.py"), "scripts", "put `PYTHONPATH=..` before the command"),
        (("own_a.py", "scripts/train.py", "pyproject.toml"), "scripts", "install it (`pip install -e ..`)"),
        (("src/own_a/__init__.py", "pyproject.toml"), ".", "or put `PYTHONPATH=src` before"),
    ],
)
def test_a_package_of_the_project_is_installed_or_found_by_its_path(
    files: tuple[str, ...], start: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    (tmp_path / ".git").mkdir()
    (tmp_path / start / "train.py").write_text("import own_a\n")
    monkeypatch.chdir(tmp_path / start)
    assert hint in module_hint("own_a", os.fspath(tmp_path))
    assert hint in module_hint("own_a", ".", read_script(Path("train.py").absolute()), sys.executable)


def test_the_metadata_of_the_project_itself_come_with_its_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "own-things"\n')
    raised = RankException(
        time_ns=1, type="PackageNotFoundError", message="No package metadata was found for own-things"
    )
    assert "pip install -e ." in hint_for(raised, str(tmp_path))


OPTION = "import argparse\nparser = argparse.ArgumentParser()\n"


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("parser.add_argument('--data-path', default='./')\nparser.add_argument('--output-dir')\n", "own --data-path;"),
        ("parser.add_argument('-r', '--root_dir', type=str)\nparser.add_argument('--lr')\n", "own --root_dir;"),
        ("parser.add_argument('--dataset')\nparser.add_argument('--data_root')\n", "own --data_root;"),
        ("parser.add_argument('--data', metavar='DIR')\nparser.add_argument('--no-data', action='store_true')\n",
         "own --data;"),
        ("parser.add_argument('--train_file')\nparser.add_argument('--data_dir')\n", "--train_file or --data_dir;"),
        ("parser.add_argument('--lr')\n", "as its README says;"),
    ],
)  # fmt: skip
def test_missing_data_are_answered_with_the_options_of_the_script(source: str, hint: str, tmp_path: Path) -> None:
    script = written({"train.py": OPTION + source}, tmp_path)
    raised = RankException(time_ns=1, type="FileNotFoundError", message="DRIVE dose not in path:'./'.")
    said = hint_for(raised, str(tmp_path), script)
    assert said.startswith("This machine lacks the data") and hint in said and "--data DIR" not in said


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ImportError", "cannot import name 'define_optimizer' from 'models' (/work/models/__init__.py)"),
        ("NameError", "name 'transform_fintune' is not defined"),
        ("UnboundLocalError", "cannot access local variable 'loss'"),
    ],
)
def test_no_argument_helps_against_a_fault_of_the_script(kind: str, message: str) -> None:
    said = hint_for(RankException(time_ns=1, type=kind, message=message))
    assert said.startswith("The script fails so however it is started")


def test_a_package_that_another_one_has_the_name_of_is_called_by_its_own(tmp_path: Path) -> None:
    assert "`pip install hydra-core` for the Python" in module_hint("hydra", os.fspath(tmp_path))


@pytest.mark.parametrize(
    ("module", "asked", "installed"),
    [
        ("generative", "monai-generative==0.2", "monai-generative"),
        ("audiotools", "descript-audiotools>=0.7", "descript-audiotools"),
        ("cleanfid", "clean-fid", "clean-fid"),
        ("clip", "clip-anytorch", "clip-anytorch"),
        ("clip", "torch", "git+https://github.com/openai/CLIP.git"),
        ("lightning", "pytorch-lightning", "lightning"),
        ("mpl_toolkits", "matplotlib", "matplotlib"),
    ],
)
def test_a_package_that_the_project_asks_for_by_a_longer_name_is_installed_by_it(
    module: str, asked: str, installed: str, tmp_path: Path
) -> None:
    (tmp_path / "requirements.txt").write_text(f"numpy\n{asked}\n")
    assert f"`pip install {installed}` for the Python" in module_hint(module, os.fspath(tmp_path))
