"""The command line in this process, with an examination built by hand where one is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor import __version__
from ddpdoctor.cli.main import COMMANDS, main
from ddpdoctor.errors import DdpDoctorError, ExitCode
from ddpdoctor.examine.one_script import ExamineRequest
from ddpdoctor.finding import Severity
from ddpdoctor.launch.request import Launch
from tests.report.examples import examination, hang, result

Output = pytest.CaptureFixture[str]


def test_the_version_goes_to_stdout(capsys: Output) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr() == (f"ddpdoctor {__version__}\n", "")


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["check", "--help"], ["explain", "-h"]])
def test_help_goes_to_stdout(arguments: list[str], capsys: Output) -> None:
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Usage: ddpdoctor")
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80


def test_the_help_of_all_commands_says_whole_what_their_own_say(capsys: Output) -> None:
    assert main(["--help"]) == 0
    listed = " ".join(capsys.readouterr().out.split())
    for name, summary in COMMANDS.items():
        assert f" {name} {summary}" in listed
        assert main([name, "--help"]) == 0
        assert summary in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", sorted({*COMMANDS} - {"clean", "completion", "schema"}))
def test_all_commands_that_report_have_the_same_options(name: str, capsys: Output) -> None:
    assert main([name, "--help"]) == 0
    told = capsys.readouterr().out
    for option in ("--output-format", "-o, --output FILE", "--report KIND=FILE", "--force", "--no-color"):
        assert option in told


def test_the_version_is_told_without_click_and_the_help_without_msgspec() -> None:
    for option, without in (("--version", "click"), ("--help", "msgspec")):
        script = (
            "import sys; sys.argv[1:] = [sys.argv[1]]; from ddpdoctor.__main__ import main; code = main()\n"
            "print(sorted(sys.modules), code)"
        )
        done = subprocess.run((sys.executable, "-c", script, option), capture_output=True, text=True, check=True)
        assert f"'{without}'" not in done.stdout
        assert done.stdout.startswith("ddpdoctor 0" if option == "--version" else "Usage: ddpdoctor")


def test_the_help_of_all_commands_imports_none() -> None:
    script = "import sys; from ddpdoctor.cli.main import main; main(['--help']); print(sorted(sys.modules))"
    done = subprocess.run((sys.executable, "-c", script), capture_output=True, text=True, check=True)
    assert "ddpdoctor.cli.main" in done.stdout
    assert not {"ddpdoctor.cli.check", "ddpdoctor.source", "ddpdoctor.catalogue"} & set(done.stdout.split("'"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Usage: ddpdoctor"),
        (["chek"], "did you mean check?"),
        (["qqq"], "no such command: qqq"),
        (["train.py"], "did you mean `ddpdoctor check train.py`?"),
        (["check", "--fix", ""], "a path is empty"),
        (["autopsy", ""], "a path is empty"),
        (["gate", "train.py", ""], "a path is empty"),
        (["check"], "give a script, `-m MODULE`, or a launch command after `--`"),
        (["check", "train.py", "-m", "train"], "either train.py or --module train, not both"),
        (["check", "train.py", "--", "torchrun", "train.py"], "both train.py and a launch command are given"),
        (["check", "-m", "nowhere.train"], "-m nowhere.train: there is no such module in"),
        (["check", "-m", "nowhere", "--diff"], "-m nowhere: there is no such module in"),
        (["check", "-m", "train.py"], "Did you mean `-m train`?"),
        (["check", "-m", "package"], "has no __main__.py"),
        (["check", "--", "torchrun", "nowhere.py"], "nowhere.py does not exist"),
        (["check", "--", "torchrun", "."], ". is a directory"),
        (["check", "--", "torchrun", "notes.ipynb"], "notes.ipynb is a notebook"),
        (["check", "--static", "--", "srun", "train.py"], "srun is not started"),
        (["check", "train.py", "--python", "nowhere"], "--python nowhere: no such program"),
        (["check", "train.py", "--python", "package"], "a directory without bin/python"),
        (["check", "train.py", "--lr", "3"], "Arguments of the script itself go after `--`."),
        (["check", "train.py", "more.py"], "several paths can only be examined with `--static`"),
        (["check", "."], ". is a directory: it can only be examined with `--static`"),
        (["check", "-"], "stdin can only be examined with `--static`"),
        (["check", "train.py", "--static", "--resume"], "`--resume` needs a run"),
        (["check", ".", "--static", "--stress", "nan"], "`--stress` needs a run"),
        (["check", "train.py", "--diff", "--equivalence"], "`--equivalence` needs a run"),
        (["check", "train.py", "--static", "--against", "torchrun train.py"], "`--against` needs a run"),
        (["check", "train.py", "--no-equivalence", "--against", "torchrun train.py"], "`--against`, not both"),
        (["check", "train.py", "--fix", "--diff"], "either --fix or --diff, not both"),
        (["check", "-", "--fix"], "cannot write to stdin"),
        (["check", "train.py", "nowhere.py", "--static"], "nowhere.py does not exist"),
        (["check", "--static", "-j", "-1", "."], "--jobs"),
        (["check", "train.py", "--nproc", "1"], "--nproc"),
        (["check", "train.py", "--nproc", "two"], "--nproc"),
        (["check", "train.py", "--nproc", "99999999999999999999"], "--nproc"),
        (["check", "train.py", "--stall-after", "1e308"], "--stall-after"),
        (["check", "train.py", "--stall-after", "nan"], "--stall-after"),
        (["check", "train.py", "--time-limit", "inf"], "--time-limit"),
        (["check", "train.py", "--batch-size", "9" * 5000], "--batch-size"),
        (["check", "--static", "-j", "9" * 30, "."], "--jobs"),
        (["check", "a" * 300 + ".py"], "File name too long"),
        (["check", "--static", "d/" * 3000 + "train.py"], "File name too long"),
        (["check", "train.py", "-o", "notes.ipynb"], "it is a notebook"),
        (["check", "train.py", "--batches", "0"], "--batches"),
        (["check", "train.py", "--time-limit", "0"], "--time-limit"),
        (["check", "train.py", "--time-limit", "nan"], "--time-limit"),
        (["check", "train.py", "--fail-on", "info"], "--fail-on"),
        (["check", "train.py", "--output-format", "xml"], "--output-format"),
        (["check", "train.py", "--static", "--select", "missing-setepoch"], "Did you mean DDP102"),
        (["explain", "DPP301"], "Did you mean DDP301"),
        (["explain", "DDP999"], "hint:  Run `ddpdoctor explain` for a list"),
        (["check", "train.py", "--static", "--ignore", "DDP99"], "there is no check called 'DDP99'"),
        (["check", "nowhere.py", "--static"], "nowhere.py does not exist"),
        (["check", "train.py", "-o", "."], "it is a directory"),
        (["check", "train.py", "-o", "nowhere/report.json"], "there is no directory"),
        (["check", "train.py", "-o", "train.py"], "the script under examination"),
        (["explain", "DDP999"], "there is no check called 'DDP999'"),
        (["explain", "DDP101", "--all"], "not both"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_said_on_stderr_and_exits_with_2(
    arguments: list[str], message: str, capsys: Output, project: Path
) -> None:
    assert main(arguments) == ExitCode.ERROR
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("broken.py", b"def main(:\n", "line 1"),
        ("notes.txt", b"hello\n", "not a Python file"),
        ("null.py", b"x = 1\0\n", "NUL"),
        ("latin.py", b"x = '\xe4'\n", "latin.py"),
        ("turned.py", b"# coding: rot13\n", "rot13 is not a text encoding"),
        ("hex.py", b"# coding: hex\n", "hex is not a text encoding"),
    ],
)
def test_a_script_that_cannot_be_read_exits_with_2(
    name: str, content: bytes, message: str, capsys: Output, project: Path
) -> None:
    (project / name).write_bytes(content)
    assert main(["check", name, "--static"]) == ExitCode.ERROR
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_a_report_that_must_not_be_written_is_refused_before_the_rehearsal(
    examined: Callable[..., list[ExamineRequest]], capsys: Output, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = examined()
    (project / "conf.yaml").write_text("lr: 1\n")
    assert main(["check", "train.py", "-o", "conf.yaml"]) == ExitCode.ERROR
    assert "not an unmodified ddpdoctor report" in capsys.readouterr().err
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "train.py")
    assert main(["check", "train.py", "--output-format", "github"]) == ExitCode.ERROR
    assert "its name is not that of a Markdown file" in capsys.readouterr().err
    assert requests == []
    assert main(["check", "train.py", "-o", "conf.yaml", "--force"]) == ExitCode.CLEAN
    assert len(requests) == 1


def test_a_report_that_cannot_be_written_any_more_goes_to_stdout(
    examined: Callable[..., list[ExamineRequest]], capsys: Output, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def examine(request: ExamineRequest, *progress: Any) -> Any:
        (project / "report.txt").write_text("came meanwhile")
        return examination(result(hang()))

    monkeypatch.setattr("ddpdoctor.examine.one_script.examine", examine)
    assert main(["check", "train.py", "-o", "report.txt"]) == ExitCode.ERROR
    out, err = capsys.readouterr()
    assert "rank-divergent-collective" in out
    assert "cannot write report.txt" in err
    assert (project / "report.txt").read_text() == "came meanwhile"


def test_a_working_directory_that_is_gone_is_told(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["check", "train.py"]) == ExitCode.ERROR
    assert capsys.readouterr().err.startswith("error: the working directory cannot be used: ")


def test_options_and_the_arguments_of_the_script_arrive(examined: Callable[..., list[ExamineRequest]]) -> None:
    requests = examined()
    words = "check train.py --nproc 3 --batches 2 --time-limit 9.5 --python /usr/bin/python3 --allow-writes --keep"
    more = "--select DDP1,hang --select DDP6 --ignore DDP102 --fail-on error -- --lr 3 -- --static"
    main([*words.split(), *more.split()])
    assert requests == [
        ExamineRequest(
            target="train.py",
            arguments=("--lr", "3", "--", "--static"),
            nproc=3,
            batches=2,
            time_limit_s=9.5,
            python="/usr/bin/python3",
            allow_writes=True,
            keep=True,
            equivalence=None,
            select=("DDP1", "hang", "DDP6"),
            ignore=("DDP102",),
            fail_on=Severity.ERROR,
            hint=True,
        )
    ]


def test_a_module_and_a_launch_command_arrive(examined: Callable[..., list[ExamineRequest]]) -> None:
    requests = examined()
    main(["check", "-m", "package.train", "--nproc", "4", "--", "--lr", "3"])
    main(["check", "--static", "--", "LR=3", "torchrun", "--nproc_per_node=8", "train.py", "--lr", "3"])
    module, command = requests
    assert (module.target, module.arguments, module.launch, module.nproc) == (
        "package.train",
        ("--lr", "3"),
        Launch(module=True),
        4,
    )
    assert (command.target, command.arguments, command.static) == ("train.py", ("--lr", "3"), True)
    assert (command.launch.starter, command.launch.ranks, command.launch.environment) == ("torchrun", 8, {"LR": "3"})


def test_the_exit_code_is_the_one_of_the_examination(
    examined: Callable[..., list[ExamineRequest]], capsys: Output
) -> None:
    examined(examination(result(hang())))
    assert main(["check", "train.py", "--output-format", "concise"]) == ExitCode.FINDINGS
    assert capsys.readouterr().out.startswith("train.py:9:1: error DDP301 rank-divergent-collective: ")


def test_a_report_goes_to_a_file_without_colours(
    examined: Callable[..., list[ExamineRequest]], capsys: Output, project: Path
) -> None:
    examined(examination(result(hang())))
    assert main(["check", "train.py", "-o", "report.txt"]) == ExitCode.FINDINGS
    assert capsys.readouterr() == ("", "")
    assert (project / "report.txt").read_text().startswith("Read 1 file; rehearsed train.py on 2 ranks")
    assert main(["check", "train.py", "--output-format", "json", "--output", "report.json"]) == ExitCode.FINDINGS
    assert json.loads((project / "report.json").read_text())["verdict"] == "findings"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DdpDoctorError("it is broken", "mend it"), ExitCode.ERROR, "error: it is broken\nhint:  mend it\n"),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED, "interrupted"),
        (RuntimeError("oops"), ExitCode.ERROR, "RuntimeError: oops\nerror: this is a defect of ddpdoctor"),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException, code: ExitCode, message: str, examined: Callable[..., list[ExamineRequest]], capsys: Output
) -> None:
    examined(error)
    assert main(["check", "train.py"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("import torch\n")
    (tmp_path / "notes.ipynb").write_text("{}")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch, project: Path) -> Callable[..., list[ExamineRequest]]:
    """Makes the command get a given examination or error, and returns the list that its requests go to."""

    def prepare(outcome: Any = None) -> list[ExamineRequest]:
        requests: list[ExamineRequest] = []

        def examine(request: ExamineRequest, *progress: Any) -> Any:
            requests.append(request)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome or examination()

        monkeypatch.setattr("ddpdoctor.examine.one_script.examine", examine)
        return requests

    return prepare
