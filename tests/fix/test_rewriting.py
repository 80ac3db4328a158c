from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ddpdoctor.errors import UsageError
from ddpdoctor.finding import Location
from ddpdoctor.fix import CannotRewrite, Edit, Fix, Rewritten, difference, edited, rewrite, write


def at(line: int, column: int, text: str, end_column: int = 0, file: str = "/f.py") -> Edit:
    return Edit(file=file, line=line, column=column, end_line=line, end_column=end_column or column, replacement=text)


def fix(*edits: Edit, safe: bool = True) -> Fix:
    place = Location(file=edits[0].file, line=edits[0].line)
    return Fix(code="DDP101", description="do it", location=place, edits=edits, safe=safe)


@pytest.mark.parametrize(
    ("before", "edits", "after"),
    [
        (b"x = f()\n", [at(1, 7, "1")], b"x = f(1)\n"),
        (b"x = 1\ny = 2", [at(2, 5, "3", 6)], b"x = 1\ny = 3"),
        (b"x = 1\r\ny = 2\r\n", [at(2, 1, "z = 3\n")], b"x = 1\r\nz = 3\r\ny = 2\r\n"),
        (b"x = 1\ry = 2\r", [at(2, 1, "z = 3\n")], b"x = 1\rz = 3\ry = 2\r"),
        (b"\xef\xbb\xbfx = 1\n", [at(1, 5, "2", 6)], b"\xef\xbb\xbfx = 2\n"),
        ("# é\nx = 'ü'; y = f\n".encode(), [at(2, 15, "()")], "# é\nx = 'ü'; y = f()\n".encode()),
        (b"# coding: latin-1\nx = '\xe4'; y = f\n", [at(2, 15, "()")], b"# coding: latin-1\nx = '\xe4'; y = f()\n"),
        (b"x = f()\n", [at(1, 7, "1"), at(1, 7, "1")], b"x = f(1)\n"),
        (b"a = 1\nb = 2\n", [at(2, 5, "4", 6), at(1, 5, "3", 6)], b"a = 3\nb = 4\n"),
        (b"x = '''\x0c\n'''\ny = f\n", [at(3, 6, "()")], b"x = '''\x0c\n'''\ny = f()\n"),
    ],
)
def test_edits_change_nothing_else(before: bytes, edits: list[Edit], after: bytes) -> None:
    assert edited(before, edits) == after


@pytest.mark.parametrize(
    ("before", "edits"),
    [
        (b"x = 1\n", [at(1, 5, "2", 6), at(1, 5, "3", 6)]),
        (b"x = 1\n", [at(1, 5, "(")]),
        (b"x = 1\n", [at(9, 1, "y")]),
        (b"x = 1\n", [at(1, 99, "y")]),
        (b"x = 1\n", [at(0, 1, "y")]),
        (b"# coding: latin-1\nx = 1\n", [at(2, 5, "'\u20ac' or ")]),
        (b"# coding: nonsense\nx = 1\n", [at(2, 5, "2", 6)]),
        (b"x = '\xff'\n", [at(1, 1, "y = 1; ")]),
    ],
)
def test_edits_that_do_not_fit_are_refused(before: bytes, edits: list[Edit]) -> None:
    with pytest.raises(CannotRewrite):
        edited(before, edits)


def test_of_overlapping_fixes_the_first_is_made(tmp_path: Path) -> None:
    file = str(tmp_path / "f.py")
    Path(file).write_text("x = 1\ny = 2\n")
    first, second, third = (
        fix(at(1, 5, "3", 6, file)),
        fix(at(1, 5, "4", 6, file), at(2, 5, "4", 6, file)),
        fix(at(2, 5, "5", 6, file)),
    )
    ((done,), left) = rewrite([first, second, third])
    assert (done.after, done.fixes, left) == (b"x = 3\ny = 5\n", (first, third), [second])


def test_a_fix_of_several_files_or_of_one_that_is_gone_is_left(tmp_path: Path) -> None:
    wide = fix(at(1, 1, "x", file="/a.py"), at(1, 1, "x", file="/b.py"))
    gone = fix(at(1, 1, "x", file=str(tmp_path / "nowhere.py")))
    assert rewrite([wide, gone]) == ([], [wide, gone])


def test_a_file_is_replaced_at_once_with_its_mode_and_links_stay_links(tmp_path: Path) -> None:
    real, link = tmp_path / "real.py", tmp_path / "link.py"
    real.write_bytes(b"x = 1\n")
    real.chmod(0o755)
    link.symlink_to(real)
    before = os.stat(real).st_ino
    write(Rewritten(file=str(link), before=b"x = 1\n", after=b"x = 2\n", fixes=()))
    assert link.is_symlink()
    assert real.read_bytes() == b"x = 2\n"
    assert os.stat(real).st_mode & 0o777 == 0o755
    assert os.stat(real).st_ino != before
    assert sorted(os.listdir(tmp_path)) == ["link.py", "real.py"]


def test_a_file_that_was_changed_meanwhile_is_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "f.py"
    file.write_bytes(b"x = 9\n")
    with pytest.raises(UsageError, match="was changed"):
        write(Rewritten(file=str(file), before=b"x = 1\n", after=b"x = 2\n", fixes=()))
    with pytest.raises(UsageError, match="cannot write"):
        write(Rewritten(file=str(tmp_path / "nowhere.py"), before=b"", after=b"", fixes=()))
    assert file.read_bytes() == b"x = 9\n"


@pytest.mark.parametrize(
    ("before", "after", "diff"),
    [
        (b"a\nb\n", b"a\nc\n", "--- a/f.py\n+++ b/f.py\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"),
        (
            b"a",
            b"b",
            "--- a/f.py\n+++ b/f.py\n@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+b\n\\ No newline at end of file\n",
        ),
        (b"a\r\n", b"b\r\n", "--- a/f.py\n+++ b/f.py\n@@ -1 +1 @@\n-a\r\n+b\r\n"),
    ],
)
def test_the_difference_is_a_patch(before: bytes, after: bytes, diff: str) -> None:
    assert difference(Rewritten(file="/f.py", before=before, after=after, fixes=()), "f.py") == diff


def test_a_file_that_is_read_only_or_was_replaced_is_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "f.py"
    file.write_bytes(b"x = 1\n")
    file.chmod(0o444)
    change = Rewritten(file=str(file), before=b"x = 1\n", after=b"x = 2\n", fixes=())
    with pytest.raises(UsageError, match="read-only"):
        write(change)
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"x = 1\n", 0o444)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UsageError, match="it is a pipe"):
        write(change)
    assert os.listdir(tmp_path) == ["f.py"]


def test_of_a_file_with_several_names_the_others_keep_its_content(tmp_path: Path) -> None:
    file, other = tmp_path / "f.py", tmp_path / "g.py"
    file.write_bytes(b"x = 1\n")
    os.link(file, other)
    write(Rewritten(file=str(file), before=b"x = 1\n", after=b"x = 2\n", fixes=()))
    assert (file.read_bytes(), other.read_bytes()) == (b"x = 2\n", b"x = 1\n")


def test_the_attributes_of_a_file_stay(tmp_path: Path) -> None:
    file = tmp_path / "f.py"
    file.write_bytes(b"x = 1\n")
    try:
        os.setxattr(file, "user.note", b"kept")
    except OSError:
        pytest.skip("the file system has no attributes")
    write(Rewritten(file=str(file), before=b"x = 1\n", after=b"x = 2\n", fixes=()))
    assert os.getxattr(file, "user.note") == b"kept"


def test_a_full_disk_leaves_a_file_that_cannot_be_replaced_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "f.py"
    file.write_bytes(b"x = 1\n")

    def in_the_way(*arguments: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("ddpdoctor.files.replace_file._write_new", in_the_way)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UsageError, match="No space left"):
        write(Rewritten(file=str(file), before=b"x = 1\n", after=b"x = 2  # longer\n", fixes=()))
    assert file.read_bytes() == b"x = 1\n"
