from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.cli.main import main
from ddpdoctor.config import NO_SETTINGS, find_settings
from ddpdoctor.errors import ConfigurationError, ExitCode
from ddpdoctor.finding import Severity
from ddpdoctor.record.streams.setup import JobMachine

Output = pytest.CaptureFixture[str]

SCRIPT = """\
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.barrier()
dist.destroy_process_group()
"""
FULL = """\
[tool.ddpdoctor]
select = ["DDP1", "DDP3"]
ignore = ["DDP101"]
fail-on = "error"
exclude = ["third_party/"]
entry-points = ["train*.py"]

[tool.ddpdoctor.per-file-ignores]
"tests/" = ["DDP301"]

[tool.ddpdoctor.thresholds]
straggler = 0.2

[tool.ddpdoctor.job]
device-memory-gib = 79.5
cores = 64
ranks-per-node = 8
"""


def test_the_nearest_file_counts(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(FULL)
    (tmp_path / "a" / "pyproject.toml").write_text("[project]\nname = 'ddpdoctor-user'\n")
    settings = find_settings(inner)
    assert (settings.file, settings.directory) == (str(tmp_path / "pyproject.toml"), tmp_path)
    assert (settings.select, settings.ignore, settings.fail_on) == (("DDP1", "DDP3"), ("DDP101",), Severity.ERROR)
    assert settings.thresholds == {"straggler": 0.2}
    assert settings.job == JobMachine(device_memory_bytes=159 << 29, cores=64, ranks_per_node=8)
    assert settings.excludes(tmp_path / "third_party" / "x.py")
    assert settings.ignored_in(tmp_path / "tests" / "x.py") == ("DDP301",)
    assert settings.ignored_in(tmp_path / "x.py") == settings.ignored_in(Path("/elsewhere/tests/x.py")) == ()
    (tmp_path / "a" / "ddpdoctor.toml").write_text('fail-on = "advice"\n')
    assert find_settings(inner).fail_on is Severity.ADVICE


def test_no_file_is_no_settings(tmp_path: Path) -> None:
    assert find_settings(tmp_path) is NO_SETTINGS


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("selct = []", "there is no setting called 'selct'", "Did you mean select?"),
        ("per_file_ignores = {}", "no setting called 'per_file_ignores'", "Did you mean per-file-ignores?"),
        ("qqq = 1", "no setting called 'qqq'", "The settings are"),
        ("select = 'DDP1'", "select must be a list of strings", "As in"),
        ("ignore = [1]", "ignore must be a list of strings", "As in"),
        ("fail-on = 'info'", "fail-on must be one of error, warning, advice", ""),
        ("fail-on = []", "fail-on must be one of", ""),
        ("per-file-ignores = []", "per-file-ignores must be a table", "As in"),
        ("per-file-ignores = {'a' = 'b'}", "must be a list of strings", ""),
        ("thresholds = 0.1", "thresholds must be a table", "As in"),
        ("thresholds = {stragler = 0.1}", "there is no threshold called 'stragler'", "straggler"),
        ("thresholds = {straggler = 10}", "straggler must be a number from 0 to 1, not 10", ""),
        ("thresholds = {straggler = true}", "straggler must be a number", ""),
        ("job = 80", "job must be a table", "As in"),
        ("job = {core = 8}", "job: there is no setting called 'core'", "Did you mean cores?"),
        ("job = {cores = 8.5}", "job: cores must be a whole number above 0, up to a million, not 8.5", ""),
        ("job = {ranks-per-node = 0}", "ranks-per-node must be a whole number above 0, up to a million, not 0", ""),
        (
            "job = {device-memory-gib = '80'}",
            "device-memory-gib must be a number of GiB above 0, up to a million, not '80'",
            "",
        ),
        (
            "job = {device-memory-gib = inf}",
            "device-memory-gib must be a number of GiB above 0, up to a million, not inf",
            "",
        ),
        ("job = {cores = true}", "cores must be a whole number", ""),
        ("select = [", "is not valid TOML", ""),
    ],
)
def test_a_wrong_setting_is_an_error(tmp_path: Path, text: str, message: str, hint: str) -> None:
    (tmp_path / "ddpdoctor.toml").write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        find_settings(tmp_path)
    assert message in caught.value.message
    assert str(tmp_path / "ddpdoctor.toml") in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize("content", [b"[tool]\nddpdoctor = 1\n", b"[tool.ddpdoctor]\n\xff\n"])
def test_a_broken_pyproject_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pyproject.toml").write_bytes(content)
    with pytest.raises(ConfigurationError):
        find_settings(tmp_path)


def test_a_word_that_means_no_check_is_an_error_that_names_the_file(project: Path, capsys: Output) -> None:
    (project / "ddpdoctor.toml").write_text('ignore = ["DDP30l"]\n')
    assert main(["check", "--static", "train.py"]) == ExitCode.ERROR
    err = capsys.readouterr().err
    assert "ddpdoctor.toml: ignore: there is no check called 'DDP30l'" in err
    assert "Did you mean DDP30" in err


@pytest.mark.parametrize(
    ("settings", "arguments", "code"),
    [
        ("", "", 1),
        ('ignore = ["DDP301"]', "", 0),
        ('ignore = ["rank-divergent-collective"]', "", 0),
        ('select = ["DDP1"]', "", 0),
        ('select = ["DDP1"]', "--select DDP301", 1),
        ('ignore = ["DDP301"]', "--select DDP301", 1),
        ('ignore = ["DDP301"]', "--ignore DDP102", 1),
        ('[per-file-ignores]\n"train.py" = ["DDP3"]', "", 0),
        ('[per-file-ignores]\n"other.py" = ["DDP3"]', "", 1),
        ('select = ["DDP301"]\nfail-on = "advice"', "", 1),
        ('select = ["DDP301"]\nfail-on = "error"', "--fail-on error", 1),
    ],
)
@pytest.mark.parametrize("target", ["train.py", "."])
def test_settings_count_and_the_command_line_wins(
    settings: str, arguments: str, code: int, target: str, project: Path
) -> None:
    (project / "ddpdoctor.toml").write_text(settings)
    assert main(["check", "--static", target, *arguments.split()]) == code


def test_excluded_files_are_examined_only_when_they_are_named(project: Path, capsys: Output) -> None:
    (project / "ddpdoctor.toml").write_text('exclude = ["train.py"]\n')
    assert main(["check", "--static", "."]) == ExitCode.INCONCLUSIVE
    assert "nothing was examined" in capsys.readouterr().out.replace("\n", " ")
    assert main(["check", "--static", "train.py"]) == ExitCode.FINDINGS
    excluded = ["check", "--static", "--force-exclude", "train.py"]
    assert main(excluded) == ExitCode.INCONCLUSIVE
    assert main([*excluded, "--exclude", "tr*"]) == ExitCode.INCONCLUSIVE
    assert main([*excluded, "--only-findings"]) == ExitCode.CLEAN


def test_entry_points_are_the_scripts_of_a_directory(project: Path, capsys: Output) -> None:
    (project / "other.py").write_text(SCRIPT)
    (project / "ddpdoctor.toml").write_text('entry-points = ["other.py"]\n')
    assert main(["check", "--static", ".", "--output-format", "concise"]) == ExitCode.FINDINGS
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(line.startswith("other.py:") for line in lines)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path
