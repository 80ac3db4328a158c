"""Many scripts at once: what is examined, what is said once, and what happens to files that cannot be read."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.cli.main import main
from ddpdoctor.errors import ConfigurationError, DdpDoctorError, ExitCode, UsageError
from ddpdoctor.examination import Examination
from ddpdoctor.examine.static_scan import SurveyRequest, in_processes, survey
from ddpdoctor.source.script import entry_point, script

Output = pytest.CaptureFixture[str]

HELPER = """\
import torch.distributed as dist


def evaluate():
    if dist.get_rank() == 0:
        dist.barrier()
"""
ENTRY = """\
import torch.distributed as dist
from helper import evaluate


def main():
    dist.init_process_group("gloo")
    evaluate()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""


def test_entry_scripts_of_a_directory_are_found_and_shared_findings_are_said_once(project: Path) -> None:
    report = _survey(".")
    assert report.scripts == ("one.py", "two.py")
    assert report.source.files == 3
    assert _places(report) == [("helper.py", 6)]
    assert report.exit_code is ExitCode.FINDINGS


def test_what_does_nothing_when_it_is_run_is_no_entry_script(project: Path) -> None:
    (project / "three.py").write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    (project / "four.py").write_text("import torch\n\nif __name__ == '__main__':\n    print(torch.__version__)\n")
    (project / "five.py").write_text("import os\n\nif __name__ == '__main__':\n    init_process_group = os\n")
    assert _survey(".").scripts == ("one.py", "three.py", "two.py")


def test_a_part_of_a_package_is_no_entry_script_for_what_it_sets_up(project: Path) -> None:
    package = project / "package"
    package.mkdir()
    joins = "import torch.distributed as dist\ndef join():\n    dist.init_process_group('gloo')\n"
    (package / "__init__.py").write_text(joins + "join()\n")
    (package / "models.py").write_text("from . import join\nimport torch\nfor name in ('a', 'b'):\n    print(name)\n")
    (package / "tool.py").write_text(f"from .models import torch\n{joins}if __name__ == '__main__':\n    join()\n")
    (package / "train.py").write_text(f"from package.models import torch\n{joins}join()\n")
    assert _survey("package").scripts == ("package/tool.py", "package/train.py")


def test_a_named_module_is_examined_by_itself_unless_an_entry_script_reads_it(project: Path) -> None:
    assert _survey("helper.py", "lonely.py").scripts == ("helper.py", "lonely.py")
    assert _survey("helper.py", "lonely.py", "one.py").scripts == ("lonely.py", "one.py")


def test_a_file_is_examined_once(project: Path) -> None:
    report = _survey("one.py", "./one.py", ".", str(project / "one.py"))
    assert report.scripts == ("one.py", "two.py")


def test_shared_modules_are_parsed_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    original = script.parse_bytes

    def parse_bytes(raw: bytes, path: Path, name: str, package: str) -> Any:
        parsed.append(path.name)
        return original(raw, path, name, package)

    monkeypatch.setattr(entry_point, "parse_bytes", parse_bytes)
    _survey(".")
    assert parsed.count("helper.py") == 1


@pytest.mark.parametrize("jobs", [2, 3])
def test_several_processes_say_the_same(project: Path, jobs: int) -> None:
    for number in range(20):
        (project / f"more_{number}.py").write_text(ENTRY.replace("gloo", f"gloo{number}"))
    alone, together = _survey("."), _survey(".", jobs=jobs)
    assert len(alone.scripts) == 22
    assert (alone.findings, alone.outcomes, alone.scripts) == (together.findings, together.outcomes, together.scripts)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"import torch\ndef main(:\n", "line 2"),
        (b"import torch\nprint 'python 2'\n", "line 2"),
        (b"import torch\n\0", "NUL"),
        (b"# coding: nonsense\nimport torch\n", "nonsense"),
        (b"import torch\nx = '\xe4'\n", "broken.py"),
    ],
)
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_file_that_cannot_be_read_costs_nothing_but_itself(
    project: Path, content: bytes, message: str, jobs: int
) -> None:
    (project / "broken.py").write_bytes(content)
    found = _survey(".", jobs=jobs)
    assert message in " ".join(found.source.notes)
    assert found.scripts == ("one.py", "two.py")
    assert found.complete
    named = _survey("one.py", "broken.py", jobs=jobs)
    assert _places(named) == [("helper.py", 6)]
    assert not named.complete
    alone = _survey("broken.py", "lonely.py")
    assert (alone.verdict, alone.exit_code) == ("inconclusive", ExitCode.INCONCLUSIVE)


def test_nothing_to_examine_is_said(project: Path) -> None:
    (project / "empty").mkdir()
    empty = _survey("empty")
    assert (empty.exit_code, empty.scripts) == (ExitCode.INCONCLUSIVE, ())
    assert empty.notes[0].startswith("nothing was examined: the given paths hold no Python file")
    (project / "empty" / "a.py").write_text("import torch\n")
    assert "none of 1 Python files" in _survey("empty").notes[0]


def test_a_missing_path_is_wrong_usage(project: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.py does not exist"):
        _survey("one.py", "nowhere.py")


def test_the_settings_nearest_to_each_script_count(project: Path) -> None:
    (project / "quiet").mkdir()
    (project / "quiet" / "three.py").write_text(ENTRY.replace("from helper", "from helper2"))
    (project / "quiet" / "helper2.py").write_text(HELPER)
    (project / "quiet" / "ddpdoctor.toml").write_text('ignore = ["DDP301"]\n')
    report = survey(SurveyRequest(paths=(".",))).examination
    assert report.scripts == ("one.py", "two.py", "quiet/three.py")
    assert [place for place in _places(report) if "helper" in place[0]] == [("helper.py", 6)]


def test_json_of_a_survey_names_the_scripts_and_that_of_one_script_does_not(project: Path, capsys: Output) -> None:
    main(["check", "--static", ".", "--output-format", "json"])
    many = json.loads(capsys.readouterr().out)
    main(["check", "--static", "one.py", "--output-format", "json"])
    one = json.loads(capsys.readouterr().out)
    main(["check", "--static", "--force-exclude", "one.py", "--output-format", "json"])
    forced = json.loads(capsys.readouterr().out)
    assert many.pop("scripts") == ["one.py", "two.py"]
    assert "scripts" not in one
    assert set(many) == set(one) == set(forced)
    for report in (one, forced):
        del report["source"]["seconds"]
    assert one == forced


def test_full_text_says_how_many_scripts_there_were(project: Path, capsys: Output) -> None:
    main(["check", "--static", "."])
    assert "2 scripts and what they import; nothing was rehearsed." in capsys.readouterr().out.replace("\n", " ")


def test_stdin_is_examined_under_its_name(project: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    text = ENTRY.replace("evaluate()\n    dist", "dist.barrier() if dist.get_rank() == 0 else None  # é\n    dist")
    _feed(monkeypatch, text.encode())
    arguments = ["check", "--static", "-", "--stdin-filename", "two.py", "--output-format", "concise"]
    assert main(arguments) == ExitCode.FINDINGS
    assert capsys.readouterr().out.startswith("two.py:7:5: error DDP301")
    _feed(monkeypatch, b"import torch\ndef main(:\n")
    assert main(arguments) == ExitCode.ERROR
    assert "two.py, line 2" in capsys.readouterr().err
    _feed(monkeypatch, b"")
    assert main(arguments) == ExitCode.INCONCLUSIVE


def test_work_comes_back_in_order_from_processes() -> None:
    assert in_processes(3, list(range(50)), lambda part: [number * 2 for number in part]) == list(range(0, 100, 2))


def test_an_error_in_a_process_is_raised_here() -> None:
    def fail(part: Any) -> Any:
        raise ConfigurationError("it is broken", "mend it")

    with pytest.raises(ConfigurationError, match="it is broken"):
        in_processes(2, list(range(8)), fail)


def test_a_process_that_dies_is_an_error() -> None:
    def die(part: Any) -> Any:
        import os

        os._exit(9)

    with pytest.raises(DdpDoctorError, match=r"died \(exit code 9\)"):
        in_processes(2, list(range(8)), die)


def _survey(*paths: str, **fields: Any) -> Examination:
    return survey(SurveyRequest(paths=paths, select=("DDP301",), **fields)).examination


def _places(report: Examination) -> list[tuple[str, int]]:
    return [(Path(found.locations[0].file).name, found.locations[0].line) for found in report.findings]


def _feed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "lonely.py").write_text("import torch\n")
    (tmp_path / "one.py").write_text(ENTRY)
    (tmp_path / "two.py").write_text(ENTRY)
    monkeypatch.chdir(tmp_path)
    return tmp_path
