from __future__ import annotations

import subprocess
import sys

import pytest

from ddpdoctor.files.patterns import matches, matches_below, parse_patterns


@pytest.mark.parametrize(
    ("pattern", "path", "directory", "expected"),
    [
        ("*.pyc", "x/y.pyc", False, True),
        ("/build", "build", True, True),
        ("/build", "x/build", True, None),
        ("docs/*.py", "docs/a.py", False, True),
        ("docs/*.py", "x/docs/a.py", False, None),
        ("docs/*.py", "docs/x/a.py", False, None),
        ("a/**/b", "a/b", False, True),
        ("a/**/b", "a/x/y/b", False, True),
        ("**/foo", "q/foo", False, True),
        ("abc/**", "abc/d/e", False, True),
        ("abc/**", "abc", True, None),
        ("data/", "data", False, None),
        ("data/", "q/data", True, True),
        ("[ab]x?", "axz", False, True),
        ("[!ab]x", "ax", False, None),
        ("[!ab]x", "cx", False, True),
        (r"\#x", "#x", False, True),
        ("x  ", "x", False, True),
        ("a.py", "abpy", False, None),
        ("[", "[", False, True),
    ],
)
def test_a_pattern_means_what_git_means(pattern: str, path: str, directory: bool, expected: bool | None) -> None:
    assert matches(parse_patterns([pattern]), path, directory=directory) is expected


def test_the_last_pattern_that_speaks_of_a_path_decides() -> None:
    patterns = parse_patterns(["*.py", "!keep.py", "", "# comment"])
    assert len(patterns) == 2
    assert matches(patterns, "a.py", directory=False) is True
    assert matches(patterns, "keep.py", directory=False) is False


def test_what_lies_in_a_matched_directory_is_matched() -> None:
    patterns = parse_patterns(["third_party/"])
    assert matches_below(patterns, "x/third_party/y/z.py")
    assert not matches_below(patterns, "x/third_party.py")


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("*a" * 200 + "b", "a" * 4_000),
        ("**/a/" * 200 + "b", "a/" * 2_000 + "c"),
        ("*[ab]?" * 200 + "c", "a" * 4_000),
    ],
)
@pytest.mark.timeout(20)
def test_no_pattern_explodes(pattern: str, path: str) -> None:
    assert matches(parse_patterns([pattern]), path, directory=False) is None


def test_each_expression_that_is_compiled_late_compiles() -> None:
    code = """
import gc, importlib, pathlib, ddpdoctor
root = pathlib.Path(ddpdoctor.__file__).parent
for path in (*root.rglob("*.py"), *(root / "checks").rglob("*.py")):
    if "import regex" in path.read_text():
        importlib.import_module(".".join(("ddpdoctor", *path.relative_to(root).with_suffix("").parts)))
late = [one for one in gc.get_objects() if type(one).__name__ == "_Expression"]
for one in late:
    one.pattern
print(len(late))
"""
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 100
