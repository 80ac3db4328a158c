from __future__ import annotations

from pathlib import Path

from ddpdoctor.files.patterns import python_files


def test_the_projects_own_files_are_found_in_order(tmp_path: Path) -> None:
    _make(tmp_path, "b.py", "a.py", "pkg/__init__.py", "pkg/x.pyw", "notes.txt", "pkg/data.json", "script")
    assert _found(tmp_path) == ["a.py", "b.py", "pkg/__init__.py", "pkg/x.pyw"]


def test_hidden_directories_environments_and_installed_packages_are_left_out(tmp_path: Path) -> None:
    _make(
        tmp_path,
        "a.py",
        ".hidden/a.py",
        ".a.py",
        "my-env/pyvenv.cfg",
        "my-env/lib/a.py",
        "conda/conda-meta/history",
        "conda/a.py",
        "venv/a.py",
        "node_modules/x/a.py",
        "x/site-packages/a.py",
        "__pycache__/a.py",
        "env/bin/python",
        "env/a.py",
        "sim/env/a.py",
    )
    assert _found(tmp_path) == ["a.py", "sim/env/a.py"]


def test_git_ignores_count_from_the_top_of_the_repository(tmp_path: Path) -> None:
    _make(tmp_path, ".git/HEAD", "x/y/a.py", "x/y/b.py", "x/y/gen/c.py", "x/y/gen/d.py", "x/y/keep_gen.py", "x/z.py")
    (tmp_path / ".gitignore").write_text("b.py\n*_gen.py\n/z.py\n")
    (tmp_path / "x" / "y" / ".gitignore").write_text("gen/\n!keep_gen.py\n")
    assert _found(tmp_path) == ["x/z.py", "x/y/a.py", "x/y/keep_gen.py"]
    assert _found(tmp_path / "x" / "y") == ["a.py", "keep_gen.py"]
    assert _found(tmp_path / "x" / "y" / "gen") == ["c.py", "d.py"]


def test_ignore_files_above_count_only_in_a_repository(tmp_path: Path) -> None:
    _make(tmp_path, "x/a.py")
    (tmp_path / ".gitignore").write_text("a.py\n")
    assert _found(tmp_path / "x") == ["a.py"]


def test_loops_of_links_end_and_broken_links_are_left_out(tmp_path: Path) -> None:
    _make(tmp_path, "x/a.py")
    (tmp_path / "x" / "loop").symlink_to(tmp_path)
    (tmp_path / "x" / "broken.py").symlink_to(tmp_path / "nowhere.py")
    (tmp_path / "linked.py").symlink_to(tmp_path / "x" / "a.py")
    (tmp_path / "directory.py").mkdir()
    assert _found(tmp_path) == ["linked.py", "x/a.py"]


def test_a_directory_that_cannot_be_read_is_empty(tmp_path: Path) -> None:
    assert list(python_files(tmp_path / "nowhere")) == []


def _make(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")


def _found(root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in python_files(root)]
