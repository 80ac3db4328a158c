"""A rank that fails for a reason that nothing explains: what to do is said by what is known, not by a guess."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddpdoctor.diagnosis.failures import Lack, lack_behind
from ddpdoctor.examination import RehearsalSection
from ddpdoctor.examine.another_try import another_try
from ddpdoctor.examine.hints import ARGUMENTS_HINT, hint_for
from ddpdoctor.examine.missing_modules import lacking_packages, module_hint
from ddpdoctor.launch.request import RehearsalRequest
from ddpdoctor.record.model import Job, Rank, RankException, RunRecord
from ddpdoctor.record.streams.training import Access
from ddpdoctor.source.script.script import read_script
from tests import forks
from tests.check_command import check

SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    {fails}


main()
"""
FROM_ANOTHER = """try:
        {cause}
    except Exception as error:
        raise RuntimeError("cannot build the model") from error"""


@pytest.mark.parametrize(
    ("fails", "files", "arguments", "hint"),
    [
        (
            "raise LookupError('no backend of this name')",
            {"requirements.txt": "torch>=2\n# plug-ins\nnobodys-backend[all]>=1.2  # its own\n-r more.txt\n"},
            ["--backend", "quick"],
            "The project asks for packages that are missing: `pip install nobodys-backend` for",
        ),
        (FROM_ANOTHER.format(cause="import nobodys_layers.deep"), {}, ["--size", "3"], "`pip install nobodys_layers`"),
        ("torch.nn.Linear(4, 1, depth=3)", {}, ["--deep"], "install the versions of Python and of its packages"),
        ("import parts", {"parts.py": "def make(:\n    pass\n"}, ["--deep"], "The ranks' Python does not accept this"),
    ],
)
def test_what_to_do_is_said_by_what_is_known(
    fails: str, files: dict[str, str], arguments: list[str], hint: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("{fails}", fails))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    _, report = check("--time-limit", "240", "train.py", "--", *arguments, cwd=tmp_path)
    assert hint in report["rehearsal"]["hint"], report["rehearsal"]


def test_arguments_are_asked_for_where_the_script_reads_some_and_was_given_none(tmp_path: Path) -> None:
    raised = RankException(time_ns=1, type="TypeError", message="expected str, not NoneType")
    job = Job(kind="rehearsal", python=sys.executable)
    (tmp_path / "none.py").write_text("import torch\n")
    (tmp_path / "some.py").write_text("import sys\nprint(sys.argv[1:])\n")
    reads, reads_none = (read_script(tmp_path / name) for name in ("some.py", "none.py"))
    given = Job(kind="rehearsal", python=sys.executable, arguments=("--data", "x"))
    assert hint_for(raised, str(tmp_path), reads, RunRecord(job=job)) == ARGUMENTS_HINT
    assert hint_for(raised, str(tmp_path), reads_none, RunRecord(job=job)) != ARGUMENTS_HINT
    assert hint_for(raised, str(tmp_path), reads, RunRecord(job=given)) != ARGUMENTS_HINT


def test_pretended_data_are_named_before_versions(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    job = Job(kind="rehearsal", python=sys.executable, pretended=("the images of cats (random ones)",))
    raised = RankException(time_ns=1, type="IndexError", message="Target 5 is out of bounds.")
    said = hint_for(raised, str(tmp_path), read_script(tmp_path / "train.py"), RunRecord(job=job))
    assert said.startswith("Rehearse with the real data") and "the images of cats (random ones)" in said


@pytest.mark.parametrize(
    ("kind", "message", "trace", "hint"),
    [
        ("AttributeError", "`np.float_` was removed in the NumPy 2.0 release. Use `np.float64`.", "", "of numpy named"),
        (
            "AttributeError",
            "module transformers has no attribute modeling_gpt2",
            'File "/v/lib/python3.11/site-packages/transformers/utils/import_utils.py", line 2, in __getattr__',
            "Install the version of transformers named",
        ),
        ("AttributeError", "module 'net' has no attribute 'Model'", 'File "/job/net.py", line 2', "without ddpdoctor"),
        ("TypeError", "mel() takes 0 positional arguments but 5 were given", "", "install the versions of Python and"),
        ("TypeError", "Trainer.__init__() got an unexpected keyword argument 'gpus'", "", "install the versions of"),
        ("TypeError", "own() missing 1 required positional argument: 'x'", "", "Rehearse with the real data"),
        ("RuntimeError", "Parent directory train_log does not exist.", "", "(`mkdir -p train_log`)"),
        (
            "FileNotFoundError",
            "[Errno 2] No such file or directory: 'runs/a/log.txt'",
            'File "train.py", line 3, in <module>\n    with open(args.log, "w") as file:\n',
            "(`mkdir -p runs/a`)",
        ),
        (
            "FileNotFoundError",
            "[Errno 2] No such file or directory: 'data/a.txt'",
            'File "train.py", line 3, in <module>\n    with open(args.data, "r") as file:\n',
            "This machine lacks the data",
        ),
    ],
)
def test_what_a_library_or_a_directory_lacks_is_no_fault_of_what_was_pretended(
    kind: str, message: str, trace: str, hint: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("import torch\ndef own(x):\n    return x\n")
    pretended = () if "ddpdoctor" in hint else ("tensorboard (a silent tracker)",)
    job = Job(kind="rehearsal", python=sys.executable, pretended=pretended)
    raised = RankException(time_ns=1, type=kind, message=message, traceback=f"Traceback:\n{trace}")
    assert hint in hint_for(raised, str(tmp_path), read_script(tmp_path / "train.py"), RunRecord(job=job))


def test_the_dependencies_of_a_project_are_read(tmp_path: Path) -> None:
    text = '[project]\nname = "x"\ndependencies = [\n  "torch",\n  "nobodys-reader[all]~=2",\n]\nkeywords = ["a"]\n'
    (tmp_path / "pyproject.toml").write_text(text)
    assert lacking_packages(str(tmp_path), sys.executable) == ("nobodys-reader",)
    for text in (
        '[project]\ndependencies = ["torch", "nobodys-reader>1; extra == \'x\'", "nobodys-one"]',
        "[project",
        "project = 3",
    ):
        (tmp_path / "pyproject.toml").write_text(text)
        assert lacking_packages(str(tmp_path), sys.executable) == (("nobodys-one",) if "nobodys" in text else ())


def test_a_file_behind_another_exception_is_missing_data() -> None:
    trace = (
        "Traceback (most recent call last):\nFileNotFoundError: [Errno 2] No such file or directory: '/data/a.txt'\n"
        "\nThe above exception was the direct cause of the following exception:\n\nTraceback (most recent call last):\n"
        "reader.Failed: cannot read\n"
    )
    assert lack_behind(RankException(time_ns=1, type="Failed", message="cannot read", traceback=trace)) == Lack("data")


@pytest.mark.parametrize("joint", ["direct cause of the following exception", "During handling of"])
def test_only_the_exception_that_another_was_raised_from_is_its_cause(joint: str) -> None:
    first = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'nobodys'\n\n"
    between = (
        f"The above exception was the {joint}:\n\n"
        if joint.startswith("direct")
        else "During handling of the above exception, another exception occurred:\n\n"
    )
    trace = f"{first}{between}Traceback (most recent call last):\nValueError: bad\n"
    found = lack_behind(RankException(time_ns=1, type="ValueError", message="bad", traceback=trace))
    assert found == (Lack("package", "nobodys") if joint.startswith("direct") else None)


def test_what_a_machine_may_do_without_is_not_asked_for(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(
        "torch\nnobodys-a==1\nnobodys-b; sys_platform == 'win32'\nnobodys-c @ git+https://x/y\nwandb\n--index-url z\n"
    )
    assert lacking_packages(str(tmp_path), sys.executable) == ("nobodys-a",)


def test_a_scikit_is_named_as_the_project_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requirements.txt").write_text("scikit-nobodys>=1\nscikit-learn\n")
    assert "`pip install scikit-nobodys`" in module_hint("sknobodys", str(tmp_path))


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        ("bare = dict(model.module.named_parameters())\n    [bare[name] for name in model.state_dict()]", True),
        (
            "kept = {name: None for name, _ in model.module.named_parameters()}\n"
            "    for name, weight in model.named_parameters():\n"
            "        if name not in kept:\n"
            "            raise RuntimeError(f'no average of {name!r}')",
            True,
        ),
        ("raise KeyError('module.head.weight')", False),
        ("{}['weight']", False),
    ],
)
def test_a_name_of_the_wrapper_that_is_asked_of_the_bare_module_is_told(fails: str, told: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("{fails}", fails))
    report = forks.check(tmp_path / "train.py")
    found = [finding["severity"] for finding in report["findings"] if finding["code"] == "DDP604"]
    assert found == ["error"] * told, report["findings"]


@pytest.mark.parametrize("is_written", [True, False])
def test_weights_that_a_rank_writes_too_late_are_not_taken_for_missing(is_written: bool, tmp_path: Path) -> None:
    raised = RankException(
        time_ns=1,
        type="FileNotFoundError",
        message="[Errno 2] No such file or directory: './best.pt'",
        traceback="torch/serialization.py",
    )
    written = Access(rank=0, action="write", path=str(tmp_path / ("best.pt" if is_written else "other.pt")))
    job = Job(kind="rehearsal", python=sys.executable)
    ranks = (Rank(rank=0), Rank(rank=1, exceptions=(raised,)))
    record = RunRecord(job=job, ranks=ranks, accesses=(written,))
    assert hint_for(raised, record=record).startswith("A rank makes this file") is is_written
    again = another_try(
        RehearsalRequest(script=tmp_path / "train.py", pretend=True), record, RehearsalSection(status="failed")
    )
    assert (again is None) is is_written
