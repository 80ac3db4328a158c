"""A file that others left is opened if it is one, and lies where it was looked for; no more is read than asked for."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpdoctor.files.untrusted import open_untrusted, quoted, read_start, read_untrusted, reason_of


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 20 << 30)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "it is a pipe"),
        (Path.mkdir, "it is a directory"),
        (_socket, "it is a socket"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device"),
        (lambda path: path.symlink_to("/etc/passwd"), "it is a link that leads out of its directory"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda path: path.write_bytes(b"x" * 101), "it has more than 100 bytes"),
        (_sparse, "it has more than 100 bytes"),
    ],
)
def test_what_is_no_file_of_the_directory_is_refused(
    make: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "f"
    make(path)
    with pytest.raises(OSError, match=reason) as raised:
        read_untrusted(path, 100, tmp_path / "in")
    assert reason_of(raised.value) == reason
    assert raised.value.filename == str(path)


def test_links_inside_of_the_directory_and_to_it_are_followed(tmp_path: Path) -> None:
    inner = tmp_path / "real" / "inner"
    inner.mkdir(parents=True)
    (inner / "f").write_bytes(b"content")
    (tmp_path / "real" / "link").symlink_to(inner / "f")
    (tmp_path / "named").symlink_to(tmp_path / "real")
    for path in ("real/inner/f", "real/link", "named/link", "named/inner/f"):
        assert read_untrusted(tmp_path / path, 100, tmp_path / path.split("/")[0]) == b"content"
    assert read_untrusted(tmp_path / "named" / "link", 100) == b"content"
    (tmp_path / "realm").mkdir()
    (tmp_path / "realm" / "f").write_bytes(b"secret")
    (tmp_path / "real" / "out").symlink_to(tmp_path / "realm" / "f")
    with pytest.raises(OSError, match="leads out"):
        read_untrusted(tmp_path / "real" / "out", 100, tmp_path / "real")


def test_what_takes_the_place_of_a_file_that_was_judged_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"judged")
    judge = os.fstat

    def then_swap(descriptor: int) -> os.stat_result:
        status = judge(descriptor)
        path.unlink(missing_ok=True)
        path.symlink_to("/etc/passwd")
        return status

    monkeypatch.setattr(os, "fstat", then_swap)
    descriptor = open_untrusted(path, tmp_path)
    monkeypatch.undo()
    assert os.read(descriptor, 100) == b"judged"
    os.close(descriptor)


def test_a_file_that_states_no_size_is_read(tmp_path: Path) -> None:
    assert b"VmPeak" in read_untrusted("/proc/self/status", 1 << 20)
    with pytest.raises(OSError, match="more than 10 bytes"):
        read_untrusted("/proc/self/status", 10)


def test_the_end_and_the_beginning_are_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"0123456789")
    assert read_start(path, 4) == b"0123"
    assert read_start(path, 4, tmp_path, -3) == b"789"
    assert read_start(path, 4, tmp_path, -30) == b"0123"
    assert read_start(path, 4, tmp_path, 8) == b"89"


def test_a_message_repeats_200_characters() -> None:
    assert quoted("short") == "short"
    assert len(quoted("x" * 1_000_000)) == 200
    assert reason_of(ValueError("y" * 1_000)).endswith("y" * 99)
