"""A rank that fails for what this machine lacks accuses nobody: inconclusive, with what to do about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.diagnosis.failures import Lack, distribution_of, lack_behind
from ddpdoctor.examine.hints import hint_for
from ddpdoctor.record.model import Job, RankException, RunRecord
from ddpdoctor.record.streams.training import FileEvent
from tests.check_command import check

SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    if dist.get_rank() == 1:
        LACKS
    dist.barrier()
    dist.destroy_process_group()


main()
"""


@pytest.mark.parametrize(
    ("lacks", "hint"),
    [
        ("import nobodys_package.parts", "`pip install nobodys_package` for the Python of the ranks"),
        ("open('/data/nobody/has/this/labels.txt')", "This machine lacks the data"),
        ("import subprocess; subprocess.run(['false'], check=True)", "a program that fails on this machine"),
        (
            "import urllib.request; urllib.request.urlopen('http://nowhere.invalid/w.pt')",
            "fetches this from the network",
        ),
    ],
)
def test_a_rank_that_lacks_something_is_inconclusive_and_says_what_to_do(tmp_path: Path, lacks: str, hint: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("LACKS", lacks))
    code, report = check("--time-limit", "240", "--no-pretend", "train.py", cwd=tmp_path)
    rehearsal = report["rehearsal"]
    assert (code, [one for one in report["findings"] if "rehearsal" in one["basis"]]) == (3, []), report["findings"]
    assert "train.py:11" in rehearsal["reason"] and hint in rehearsal["hint"], rehearsal


@pytest.mark.parametrize(
    ("kind", "message", "lack"),
    [
        ("OSError", "We couldn't connect to 'https://huggingface.co' to load this file", "network"),
        ("ConnectionError", "HTTPSConnectionPool(host='x', port=443): Max retries exceeded with url: /", "network"),
        ("RuntimeError", "Dataset not found or corrupted. You can use download=True to download it", "data"),
        ("RuntimeError", "Connection closed by peer [127.0.0.1]:4711", ""),
        ("FileNotFoundError", "[Errno 2] No such file or directory: '/data/train.csv'", "data"),
        ("FileNotFoundError", "[Errno 2] No such file or directory: 'out/model.pt'", ""),
        ("FileNotFoundError", "[Errno 2] No such file or directory: '/work/out/other.pt'", ""),
        (
            "ImportError",
            "cannot import name '_pil_interp' from 'timm.data.transforms' (/e/site-packages/timm/t.py)",
            "version",
        ),
        ("ImportError", "cannot import name 'train' from 'engine' (/work/engine.py)", ""),
        ("ImportError", "FlashAttention2 is on: the package for it doesn't seem to be installed.", "package"),
        ("ImportError", "T5Tokenizer requires sentencepiece, but it was not found in your environment.", "package"),
        ("ImportError", "Using `bitsandbytes` needs it: pip install -U bitsandbytes", "package"),
        ("ImportError", "attempted relative import with no known parent package", ""),
        ("ModuleNotFoundError", "No module named 'torch._six'", "version"),
        ("RuntimeError", "operator torchvision::nms does not exist", "version"),
        ("OSError", "Could not load this library: /e/site-packages/torchaudio/lib/libtorchaudio.abi3.so", "version"),
        ("ValueError", "too many values to unpack (expected 2)", ""),
    ],
)
def test_what_the_machine_lacks_is_told_from_what_the_script_does(kind: str, message: str, lack: str) -> None:
    record = RunRecord(
        job=Job(kind="rehearsal"), files=(FileEvent(rank=0, action="create", path="/work/out/model.pt"),)
    )
    record = RunRecord(job=record.job, files=(*record.files, FileEvent(rank=0, action="create", path="/work/out")))
    communication = "closed by peer" in message
    found = lack_behind(RankException(time_ns=1, type=kind, message=message, communication=communication), record)
    assert (found.kind if found else "") == lack


def test_a_missing_module_is_named_with_its_package() -> None:
    raised = RankException(time_ns=1, type="ModuleNotFoundError", message="No module named 'cv2'")
    assert lack_behind(raised) == Lack("package", "cv2")
    assert distribution_of("cv2") == "opencv-python-headless"
    assert distribution_of("sklearn.metrics") == "scikit-learn" and distribution_of("apex") == ""


@pytest.mark.parametrize(
    ("module", "files", "hint"),
    [
        ("align.core", ("align/core.pyx", "align/__init__.py"), "core is compiled from align of this project"),
        ("align.core", ("align/__init__.py",), "align of this project has no submodule align.core: a file is missing"),
        ("align.core", ("align/README.md",), "or a package is meant that is not installed (`pip install align`)"),
        ("align.core", ("src/align/core.py",), "align is in this project: put `PYTHONPATH=src`"),
        ("align.core", ("align/core/__init__.py",), "align is in this project: put `PYTHONPATH=.`"),
        ("settings.small", ("settings.py",), "settings.py of this project has no submodule settings.small"),
        (
            "nobodys.part",
            (),
            "has nobodys, but no submodule nobodys.part: install the version of nobodys that the script's README",
        ),
        ("nobodys", (), "`pip install nobodys`"),
        ("google.protobuf", (), "`pip install protobuf`"),
    ],
)
def test_a_missing_module_of_the_project_is_built_found_or_lacking(
    module: str, files: tuple[str, ...], hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert hint in hint_for(RankException(time_ns=1, type="ModuleNotFoundError", message=f"No module named '{module}'"))
