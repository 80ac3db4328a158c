"""Bad input costs one clear sentence; the rest is used, and exit 3 says that nothing could be concluded."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import random
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpdoctor.autopsy.dead_job import AutopsyRequest, autopsy
from ddpdoctor.cli.main import main
from ddpdoctor.errors import ExitCode, UsageError
from ddpdoctor.examination import Examination
from ddpdoctor.postmortem import inputs, log_reader, scan
from ddpdoctor.postmortem.read import read_postmortem
from tests.autopsy.test_logs import LOST, RAISED

GOOD = RAISED.format(mark="[rank1]: ") + LOST.format(mark="[rank0]: ")


def examined(*paths: Path | str, stdin: bytes = b"") -> Examination:
    return autopsy(AutopsyRequest(paths=tuple(map(str, paths))), io.BytesIO(stdin))


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.log"
    path.write_text(GOOD)
    return path


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (os.urandom(4_096), "neither text nor"),
        (b"\x1f\x8b\x08\x00broken", "cannot be read"),
        (b"PK\x03\x04broken", "cannot be read"),
        (b"\x80\x04K\x01.", "dump"),
    ],
)
def test_a_file_that_is_no_log_costs_a_sentence_and_the_rest_is_used(
    content: bytes, sentence: str, tmp_path: Path, good: Path
) -> None:
    bad = tmp_path / "bad.zip"
    bad.write_bytes(content)
    alone, beside = examined(bad), examined(bad, good)
    assert (alone.exit_code, alone.findings) == (ExitCode.INCONCLUSIVE, ())
    for examination in (alone, beside):
        (note,) = examination.notes
        assert note.startswith(str(bad)) and sentence in note
    assert (beside.exit_code, beside.findings[0].ranks) == (ExitCode.FINDINGS, (1,))


def test_a_path_that_is_not_there_is_wrong_usage_unless_another_is(tmp_path: Path, good: Path) -> None:
    with pytest.raises(UsageError, match="there is no"):
        examined(tmp_path / "nowhere.log")
    examination = examined(tmp_path / "nowhere.log", good)
    assert examination.exit_code is ExitCode.FINDINGS
    assert "cannot be read" in examination.notes[0]


@pytest.mark.parametrize("cut", [20, 60, 120, 170, len(GOOD) - 5])
def test_a_log_that_is_cut_in_the_middle_of_a_line_is_read_as_far_as_it_goes(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "cut.log"
    path.write_text(GOOD[:cut])
    assert examined(path).exit_code in (ExitCode.FINDINGS, ExitCode.INCONCLUSIVE)
    path.write_text(GOOD[cut:])
    assert examined(path).exit_code in (ExitCode.FINDINGS, ExitCode.INCONCLUSIVE)


def test_without_a_rank_in_any_line_the_cause_is_told_without_one(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text(RAISED.format(mark="") + LOST.format(mark=""))
    first = examined(path).findings[0]
    assert (first.code, first.ranks, first.title) == ("DDP706", (), "a rank raised KeyError at data.py:12: 'cat'")


def test_ten_restarts_in_one_file_are_one_cause_ten_times(tmp_path: Path) -> None:
    failed = (
        "E1120 20:17:{:02}.540000 20552 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) "
        "local_rank: 1 (pid: {}) of binary: /opt/conda/bin/python3\n"
    )
    path = tmp_path / "job.log"
    path.write_text("".join(GOOD + failed.format(number, 1_000 + number) for number in range(10)))
    examination = examined(path)
    assert examination.autopsy is not None and examination.autopsy.attempts == 10
    assert [finding.role for finding in examination.findings] == ["cause", "echo"]
    assert "the same happened in 10 attempts" in [fact.text for fact in examination.findings[0].evidence][-1]


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1", "utf-8-sig"])
def test_other_encodings_are_read(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_bytes(("Lösung größer\n" + GOOD).encode(encoding))
    assert examined(path).findings[0].ranks == (1,)


def test_colours_and_progress_bars_hide_nothing(tmp_path: Path) -> None:
    bar = "\r 50%|#####     | 5/10 [00:01<00:01]\r100%|##########| 10/10 [00:02<00:00]\r"
    path = tmp_path / "job.log"
    path.write_text("".join(f"{bar}\x1b[31m{line}\x1b[0m\n" for line in GOOD.splitlines()))
    first = examined(path).findings[0]
    assert (first.code, first.ranks) == ("DDP706", (1,))


def test_text_from_a_log_cannot_command_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.log"
    header = 'Traceback (most recent call last):\n  File "/x.py", line 1, in f\n    x\n'
    path.write_text(f"{header}OSError: \x07\x9b2J\u202ebad\n")
    assert main(["autopsy", str(path)]) == ExitCode.FINDINGS
    shown = capsys.readouterr().out
    assert not any(character in shown for character in "\x07\x9b\u202e")


def test_a_compressed_log_is_read_and_a_bomb_is_not(tmp_path: Path) -> None:
    packed, bomb = tmp_path / "job.log.gz", tmp_path / "bomb.log.gz"
    packed.write_bytes(gzip.compress(GOOD.encode()))
    assert examined(packed).findings[0].ranks == (1,)
    with gzip.open(bomb, "wb", compresslevel=9) as file:
        for _ in range(100):
            file.write(bytes(1 << 20))
    (note,) = examined(bomb).notes
    assert "unpacks to more than" in note or "neither text" in note


def test_a_zip_bomb_of_text_stops_at_its_bound(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.zip"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("job.log", b"ab c" * (25 << 20))
    (note,) = examined(bomb).notes
    assert "unpacks to more than 64 MiB" in note


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_of_an_archive_all_logs_are_read_as_far_as_they_go(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for rank, text in enumerate((LOST, RAISED)):
            content = text.format(mark="").encode()
            entry = tarfile.TarInfo(f"run/x/attempt_0/{rank}/stderr.log")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    path = tmp_path / "run.tar.packed"
    path.write_bytes(pack(written.getvalue()))
    assert [(one.code, one.ranks) for one in examined(path).findings] == [("DDP706", (1,)), ("DDP306", (0,))]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // (8 if pack is bytes else 2)])
    assert any("to its end" in note or "cannot be read" in note for note in examined(path).notes)


@pytest.mark.parametrize(("pack", "suffix"), [(lzma.compress, "xz"), (bz2.compress, "bz2")])
def test_a_log_of_another_packer_is_read(pack: Callable[[bytes], bytes], suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"job.log.{suffix}"
    path.write_bytes(pack(GOOD.encode()))
    assert examined(path).findings[0].ranks == (1,)


def test_what_is_packed_in_a_way_that_is_not_read_costs_a_sentence_with_the_command(tmp_path: Path) -> None:
    path = tmp_path / "job.log.7z"
    path.write_bytes(b"7z\xbc\xaf\x27\x1c" + bytes(40))
    assert "`7z x FILE`" in examined(path).notes[0]


def test_a_pipe_is_read_and_one_that_nobody_writes_to_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(GOOD))
    writer.start()
    first = examined(pipe).findings[0]
    writer.join()
    assert first.ranks == (1,)
    monkeypatch.setattr(inputs, "PIPE_PATIENCE_S", 0.2)
    examination = examined(pipe)
    assert examination.exit_code is ExitCode.INCONCLUSIVE
    assert "a pipe without a writer" in examination.notes[0]


def test_stdin_is_read_as_a_file_is(good: Path) -> None:
    for content in (GOOD.encode(), gzip.compress(GOOD.encode())):
        assert examined("-", stdin=content).findings[0].ranks == (1,)
    assert examined("-", stdin=b"").exit_code is ExitCode.INCONCLUSIVE


def test_of_a_directory_with_too_many_files_so_many_are_read(
    tmp_path: Path, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(300):
        (tmp_path / f"x{number:05}.log").touch()
    monkeypatch.setattr(inputs, "MOST_FILES", 200)
    examination = examined(tmp_path)
    assert examination.findings[0].ranks == (1,)
    assert "more than 200 files" in examination.notes[0]


def test_a_harmless_error_of_every_step_does_not_hide_the_one_that_ended_the_job(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    noise = "".join(
        f"step {step}: Error: image {step * 7} could not be decoded, took another\n" for step in range(9_000)
    )
    path.write_text(noise + "[rank1]: " + RAISED.format(mark="[rank1]: ").removeprefix("[rank1]: ") + noise)
    examination = examined(path)
    assert examination.findings[0].ranks == (1,)
    assert examination.autopsy is not None and examination.autopsy.lines > 18_000
    assert f"job.log:{9_001}" in examination.findings[0].evidence[0].text


def test_of_a_log_of_nothing_but_failures_the_beginning_and_the_end_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "MOST_TAKEN", 5_000)
    monkeypatch.setattr(scan, "END_BYTES", 4_000)
    path = tmp_path / "job.log"
    letters = "".join(f"Error: {'x' * (step % 97)}{'y' * (step % 89)} went wrong\n" for step in range(8_000))
    path.write_text(RAISED.format(mark="[rank1]: ") + letters)
    examination = examined(path)
    assert examination.findings[0].ranks == (1,)
    assert any(note.startswith("of lines 5,") and "only what is new" in note for note in examination.notes)
    monkeypatch.setattr(log_reader, "MOST_INCIDENTS", 100)
    path.write_text(letters.replace("Error: ", "ValueError: ") + RAISED.format(mark="[rank1]: "))
    examination = examined(path)
    assert examination.findings[0].ranks == (1,)
    assert f"job.log:{8_001}" in examination.findings[0].evidence[0].text


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("mark", ["[rank{}]: ", "{}: ", "", "2026-11-20T20:17:56.12{}Z stderr F "])
def test_in_a_log_of_nothing_but_tracebacks_another_one_is_found(
    mark: str, mixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "MOST_TAKEN", 2_000)
    monkeypatch.setattr(scan, "END_BYTES", 4_000)
    noise, of_ranks = random.Random(0), "{}" in mark[:8]
    lines: list[str] = []
    for step in range(2_000):
        text = RAISED.format(mark="").replace("KeyError: 'cat'", f"OSError: shard {noise.random().hex()} of {step}")
        if step == 1_200:
            text = RAISED.format(mark="").replace("KeyError: 'cat'", "MemoryError: no room")
            at = len(lines) + 1
        told = [[mark.format(rank) + line for line in text.splitlines()] for rank in range(2)]
        if step == 1_200 or not mixed or not of_ranks:
            lines += told[0] if step == 1_200 else told[0] + told[1]
        else:
            lines += (line for both in zip(*told, strict=True) for line in both)
    path = tmp_path / "job.log"
    path.write_text("\n".join(lines) + "\n")
    (found,) = (one for one in read_postmortem((str(path),)).record.logs.incidents if one.type == "MemoryError")
    assert (found.line, len(found.frames), found.rank) == (at, 2, 0 if of_ranks else None)


@pytest.mark.parametrize(
    ("usual", "other"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 31, pid={}, name=python", "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, name=python"),
        ("kernel: NVRM: Xid (PCI:0000:31:00): 43, pid={}", "kernel: NVRM: Xid (PCI:0000:86:00): 43, pid=7"),
        (
            "srun: error: node3: task 5: Exited with exit code 1",
            "srun: error: node3: task 5: Exited with exit code 137",
        ),
        ("bash: line 1: Process {} died with signal 15", "bash: line 1: Process 10 died with signal 11"),
        (
            "[launch] sigkill_handler] exits with return code = 1",
            "[launch] sigkill_handler] exits with return code = -9",
        ),
        ("Pod: trainer exited with code 1", "Pod: trainer exited with code 139"),
        ("    Exit Code:    1  Error", "    Exit Code:    137  Error"),
        (
            "CalledProcessError: returned non-zero exit status 1.",
            "CalledProcessError: returned non-zero exit status 134.",
        ),
        ("=   EXIT STATUS: 1, Error", "=   EXIT STATUS: 139, Error"),
        ("Error: job.service: exited, status=1/FAILURE", "Error: job.service: exited, status=203/FAILURE"),
        ("Error: died with <Signals.SIGTERM: 15>", "Error: died with <Signals.SIGTERM: 11>"),
        ("=   KILLED BY SIGNAL: 1 (Error {})", "=   KILLED BY SIGNAL: 9 (Error 8)"),
    ],
)
def test_in_a_log_of_one_failure_its_other_code_is_found(
    usual: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "MOST_TAKEN", 2_000)
    monkeypatch.setattr(scan, "END_BYTES", 4_000)
    taken: list[tuple[bytes, int]] = []

    def take(line: bytes, number: int) -> scan.Heed:
        taken.append((line, number))
        return "something"

    lines = [usual.format(number) for number in range(9_000)]
    lines[5_000] = other
    path = tmp_path / "job.log"
    path.write_text("\n".join(lines) + "\n")
    scanner = scan.Scanner(take, lambda before: None, lambda: None)
    with path.open("rb") as stream:
        scanner.read(stream)
    assert scanner.sifted is not None and scanner.sifted[0] > 2_000
    assert [number for line, number in taken if line.decode() == other] == [5_001]
    assert len(taken) < 2_200


def test_an_error_file_that_is_no_json_costs_a_sentence(tmp_path: Path, good: Path) -> None:
    bad = tmp_path / "error.json"
    bad.write_text('{"message": {"py_callstack"' + "[" * 200_000)
    examination = examined(bad, good)
    assert "not a torchelastic error file" in examination.notes[0]
    assert examination.findings[0].ranks == (1,)


def test_the_json_has_the_first_cause_first_and_says_what_is_an_echo(
    good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["autopsy", str(good), "--output-format", "json"]) == ExitCode.FINDINGS
    report = json.loads(capsys.readouterr().out)
    assert [finding["role"] for finding in report["findings"]] == ["cause", "echo"]
    assert report["autopsy"]["certain"] is True
    assert report["exit_code"] == 1


def test_without_a_path_the_command_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autopsy"]) == ExitCode.ERROR
    assert "no log or dump was given" in capsys.readouterr().err


def test_an_autopsy_needs_no_torch_and_no_screen(good: Path) -> None:
    code = (
        "import sys; from ddpdoctor.cli.main import main; main(['autopsy', sys.argv[1], '--output-format', 'concise']);"
        "print({'torch', 'textual', 'psutil', 'numpy'} & sys.modules.keys())"
    )
    done = subprocess.run((sys.executable, "-c", code, good), capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")
