"""Files that reports go to: ours are replaced, all else stays, whatever it is called and whatever is asked for."""

from __future__ import annotations

import gzip
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpdoctor.cli.output import checks_of
from ddpdoctor.errors import UsageError
from ddpdoctor.examination import Examination
from ddpdoctor.files import replace_file as replacing
from ddpdoctor.record.model import Job, RunRecord
from ddpdoctor.report.formats import FORMATS, rendered
from ddpdoctor.report.output_file import STEP_SUMMARY, OutputFile, append_step_summary, refuse_step_summary
from ddpdoctor.report.own_reports import is_own_report
from ddpdoctor.report.run import chrome_trace
from tests.report.examples import dataparallel, examination, hang, result
from tests.report.test_reports import failed

EXAMPLES: dict[str, Callable[[], Examination]] = {
    "findings": lambda: examination(result(hang()), result(dataparallel(19))),
    "clean": examination,
    "inconclusive": failed,
}
NOT_OURS = {
    "conf.yaml": b"lr: 0.1\n",
    "train": b"import torch\n",
    "run.sh": b"#!/bin/sh\n",
    "package.json": b'{"name": "ddpdoctor", "tool": {"name": "other"}}',
    "other.sarif": b'{"runs": [{"tool": {"driver": {"name": "ruff"}}}]}',
    "two.sarif": b'{"runs": [{"tool": {"driver": {"name": "ddpdoctor"}}}, {"tool": {"driver": {"name": "ruff"}}}]}',
    "list.json": b"[1, 2]",
    "objects.json": b'[{"description": "mine"}]',
    "empty-object.json": b"{}",
    "junit.xml": b'<?xml version="1.0"?>\n<testsuites name="pytest"/>\n',
    "notes.md": b"## ddpdoctor: findings\n\nwhat I think of them\n",
    "notes.txt": b"Read 1 file in 0.01 s; train.py was not rehearsed.\n",
    "lint.txt": b"train.py:3:1: E501 line too long\n",
    "mixed.txt": b"train.py:9:1: error DDP301 hang: it hangs\nmend this tomorrow\n",
    "cut.txt": b"train.py:9:1: error DDP301 hang: it hangs",
    "weights.bin": bytes(range(256)),
    "blank.txt": b"\n",
    "deep.json": b"[" * 100_000,
    "data.csv.gz": gzip.compress(b"a,b\n"),
    "broken.gz": gzip.compress(b"[]\n")[:-4],
}


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("output_format", FORMATS)
def test_a_report_of_ours_is_replaced_until_somebody_writes_in_it(
    output_format: str, example: str, tmp_path: Path
) -> None:
    file = tmp_path / "report"
    _write(file, EXAMPLES[example](), output_format)
    for other in FORMATS:
        _write(file, EXAMPLES["findings"](), other)
    _write(file, EXAMPLES[example](), output_format)
    file.write_bytes(file.read_bytes() + b"my own thoughts\n")
    before = file.read_bytes()
    with pytest.raises(UsageError, match="not an unmodified ddpdoctor report"):
        _write(file, EXAMPLES[example](), output_format)
    assert file.read_bytes() == before


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_of_ours_is_replaced(name: str, tmp_path: Path) -> None:
    packed = chrome_trace.encode(RunRecord(job=Job(kind="run")))
    content = packed if name.endswith(".gz") else gzip.decompress(packed)
    for _ in range(2):
        OutputFile(str(tmp_path / name)).write(content)
    assert (tmp_path / name).read_bytes() == content


@pytest.mark.parametrize("output_format", ["text", "diff"])
def test_prose_of_other_commands_is_sealed(output_format: str, tmp_path: Path) -> None:
    file = tmp_path / "report"
    for _ in range(2):
        OutputFile(str(file)).write_text("--- a/train.py\n+++ b/train.py\n", output_format)
    assert is_own_report(file.read_bytes())
    assert not is_own_report(b"--- a/train.py\n+++ b/train.py\n")
    assert not is_own_report(file.read_bytes().replace(b"train", b"xrain"))


@pytest.mark.parametrize("name", NOT_OURS)
def test_what_is_not_ours_stays_unless_the_user_insists(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(NOT_OURS[name])
    with pytest.raises(UsageError, match="not an unmodified ddpdoctor report"):
        OutputFile(str(file)).refuse()
    with pytest.raises(UsageError, match="not an unmodified ddpdoctor report"):
        OutputFile(str(file)).write_text("text", "full")
    assert file.read_bytes() == NOT_OURS[name]
    OutputFile(str(file), force=True).write_text("text", "json")
    assert file.read_bytes() == b"text"


def test_a_script_stays_even_when_the_user_insists(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("import torch\n")
    (tmp_path / "link").symlink_to("train")
    (tmp_path / "other.py").write_text("import torch\n")
    for name in ("train", "link", "other.py"):
        with pytest.raises(UsageError, match=r"the script under examination|a Python file"):
            OutputFile(str(tmp_path / name), force=True, sources=(tmp_path / "train",)).refuse()


def test_mode_and_links_stay_and_nothing_else_is_left(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    real, link = tmp_path / "deep" / "report.json", tmp_path / "report.json"
    link.symlink_to("deep/report.json")
    _write(link, examination(), "json")
    assert stat.S_IMODE(real.stat().st_mode) == 0o666 & ~_umask()
    real.chmod(0o640)
    _write(link, examination(), "json")
    assert link.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert os.listdir(tmp_path / "deep") == ["report.json"]


def test_an_empty_file_is_written_and_a_file_that_came_meanwhile_is_not(tmp_path: Path) -> None:
    file = tmp_path / "report"
    file.touch()
    _write(file, examination(), "full")
    new = tmp_path / "new"
    wanted = OutputFile(str(new))
    wanted.refuse()
    new.write_text("written during the rehearsal")
    with pytest.raises(UsageError, match="cannot write"):
        wanted.write_text("text", "full")
    with pytest.raises(FileExistsError):
        replacing.replace_file(str(new), b"text", None)
    before = new.stat()
    new.write_text("and again, longer")
    with pytest.raises(FileExistsError):
        replacing.replace_file(str(new), b"text", before)
    assert new.read_text() == "and again, longer"
    assert sorted(os.listdir(tmp_path)) == ["new", "report"]


def test_where_a_file_cannot_be_replaced_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report"
    file.write_bytes(b"a long report")

    def refuses(*paths: str) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(os, "replace", refuses)
    replacing.replace_file(str(file), b"short", file.stat())
    assert file.read_bytes() == b"short"
    assert os.listdir(tmp_path) == ["report"]


def test_a_named_pipe_gets_the_report_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    OutputFile(str(pipe)).refuse()
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    OutputFile(str(pipe)).write_text("text", "json")
    reader.join()
    assert got == [b"text"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_named_pipe_that_nobody_reads_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpdoctor.report.output_file.READER_WITHIN_S", 0.1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="the pipe has no reader"):
        OutputFile(str(tmp_path / "pipe")).write_text("text", "json")


def test_a_name_of_an_open_file_is_written_where_it_stands(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+b") as log:
        log.write(b"before ")
        log.flush()
        wanted = OutputFile(f"/dev/fd/{log.fileno()}")
        wanted.refuse()
        wanted.write_text("text", "json")
    assert (tmp_path / "log").read_bytes() == b"before text"
    with (tmp_path / "log").open("rb") as log, pytest.raises(UsageError, match="for reading only"):
        OutputFile(f"/dev/fd/{log.fileno()}").refuse()
    closed = os.dup(0)
    os.close(closed)
    with pytest.raises(UsageError, match=f"cannot write /dev/fd/{closed}: it is not open"):
        OutputFile(f"/dev/fd/{closed}").refuse()
    OutputFile(os.devnull).write_text("text", "full")


@pytest.mark.parametrize("name", ["", ".", "nowhere/report", "a\0b", "x" * 300, "y/" * 3000])
def test_a_name_that_cannot_be_written_is_refused_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="cannot write"):
        OutputFile(name).refuse()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("SUMMARY.md", b"# Build\n\n| a | b |\n"),
        ("SUMMARY.md", b""),
        ("summary", b"Done\n\n- item\n"),
        ("step_summary_0c6e", b"import torch\n"),
    ],
)
def test_a_step_summary_is_appended_to(
    name: str, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    append_step_summary(str(file), b"ours\n", ())
    assert file.read_bytes() == content + b"ours\n"
    monkeypatch.setenv(STEP_SUMMARY, str(file))
    OutputFile(str(file)).write_text("ours again\n", "markdown")
    assert file.read_bytes() == content + b"ours\nours again\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.py", b""),
        ("train", b"import torch\n"),
        ("train", b"main()\n"),
        ("run", b"#!/bin/sh\n"),
        ("conf.yaml", b"lr: 1\n"),
        ("requirements.txt", b"torch\n"),
        ("settings", b"lr = 1\n"),
        ("data", b'{"a": 1}'),
        ("weights", b"\0\1"),
    ],
)
def test_what_is_no_summary_is_not_appended_to(name: str, content: bytes, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UsageError, match="nothing is appended"):
        append_step_summary(str(file), b"ours\n", ())
    assert file.read_bytes() == content
    with pytest.raises(UsageError, match="cannot be created"):
        refuse_step_summary(str(tmp_path / "nowhere" / "file"), ())
    with pytest.raises(UsageError, match="a directory"):
        refuse_step_summary(str(tmp_path), ())


def _write(file: Path, report: Examination, output_format: str) -> None:
    text = rendered(report, output_format, checks_of, 80, colour=False)
    OutputFile(str(file)).write_text(text, output_format)


def _umask() -> int:
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path)])
def test_what_takes_the_place_of_a_report_is_refused_at_once(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddpdoctor.report.output_file.READER_WITHIN_S", 0.1)
        with pytest.raises(UsageError, match="cannot write"):
            OutputFile(str(tmp_path / "report"), force=True).write_text("text", "full")
    assert len(os.listdir(tmp_path)) == 1


def test_a_full_device_is_an_error() -> None:
    with pytest.raises(UsageError, match="cannot write /dev/full: No space left"):
        OutputFile("/dev/full").write_text("text", "full")
