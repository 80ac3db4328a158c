"""Adds to the site what has its source elsewhere, so that nothing is written twice.

A page for each check from its own docstring and its file of cases; the documents at the root; the tables of the tests;
the options of each command from its ``--help``; the pictures of the screens from the golden files of their tests.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from ddpdoctor.catalogue.registry import find, load, read_catalogue
from ddpdoctor.check import LoadedCheck
from ddpdoctor.report.explanation import VERBATIM, sections, sees, summary

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "tests" / "tui" / "golden_files"
DOCUMENTS = {
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "launchers.md": "examples/clusters/README.md",
    "matrix.md": "tests/grid/MATRIX.md",
    "precision.md": "tests/precision/PRECISION.md",
}
EXAMPLES = ("examples/ci/github.yml", "examples/ci/gitlab-ci.yml", "examples/ci/Jenkinsfile")
FAMILIES = {
    "0": "Comments",
    "1": "Data",
    "2": "Gradients",
    "3": "Collectives",
    "4": "Speed",
    "5": "Launch",
    "6": "State",
    "7": "Death",
    "9": "Gate",
}
"""By the digit behind ``DDP``."""
BESIDE = ("DDP001", "DDP901", "DDP902", "DDP903")
_CASES_HEAD = re.compile(r"\A# .*\n+")
_BUNDLE = re.compile(r'<script src="([^"]*)assets/javascripts/bundle')
_FROM_ELSEWHERE = re.compile(r'<script src="https://unpkg\.com/[^"]*"></script>')
_HELP = re.compile(r"^<!-- options: (\w+) -->$", re.MULTILINE)


def on_config(config: Any) -> Any:
    """List pages that the menu does not name under a heading of their own, so that each can be reached."""
    listed = str(config["nav"])
    more = sorted(path.name for path in (ROOT / "docs").glob("*.md") if f"'{path.name}'" not in listed)
    if more:
        config["nav"].append({"More": more})
    return config


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the pages and pictures."""
    for name, source in DOCUMENTS.items():
        files.append(File.generated(config, name, content=_reachable((ROOT / source).read_text(encoding="utf-8"))))
    for name in EXAMPLES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for picture in sorted(PICTURES.glob("*.svg")):
        if ".new" not in picture.name:
            files.append(File.generated(config, f"screens/{picture.name}", abs_src_path=str(picture)))
    checks = tuple(_checks())
    for check in checks:
        files.append(File.generated(config, f"checks/{check.check.name}.md", content=_page(check)))
    files.append(File.generated(config, "checks/index.md", content=_list(checks)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put in the options of commands, and turn links that leave ``docs`` to what the site has of it."""
    return _HELP.sub(lambda match: _options(match[1]), markdown.replace("](../", "]("))


def on_post_page(output: str, **_: Any) -> str:
    """Put a script of the site in the place of the one that the offline plug-in would load from elsewhere."""
    up = _BUNDLE.search(output)
    return _FROM_ELSEWHERE.sub(f'<script src="{up[1] if up else ""}assets/search-from-disk.js"></script>', output)


on_post_template = on_post_page
"""The page of an address that is not there is no page of its own to MkDocs."""


def _checks() -> Iterator[LoadedCheck]:
    catalogue = read_catalogue()
    codes = sorted({entry.code for entry in catalogue.entries} | set(BESIDE))
    return (load(find(catalogue, code)) for code in codes)


def _page(check: LoadedCheck) -> str:
    about = check.check
    severities = ", ".join(f"{severity.value} in the {basis}" for basis, severity in about.severity.items())
    lines = [f"# {about.code} {about.name}", "", f"{summary(check.documentation)}.", ""]
    lines += [f"*Looks at the {' and the '.join(sees(check))}; {severities}.*", ""] if sees(check) else []
    for heading, text in sections(check.documentation).items():
        lines += [f"## {heading}", "", *_body(heading, text), ""]
    for place in (ROOT / "checks").glob(f"*/{check.check.name.replace('-', '_')}.md"):
        cases = _CASES_HEAD.sub("", place.read_text(encoding="utf-8"))
        lines += ["## Scripts that it is tested on", "", "A comment marks each line that is found.", ""]
        lines += [re.sub(r"^```python.*$", "```python", cases, flags=re.MULTILINE)]
    return "\n".join(lines)


def _body(heading: str, text: str) -> list[str]:
    if heading == "References":
        return [f"* <{line}>" if line.startswith("http") else f"* {line}" for line in text.splitlines() if line.strip()]
    if heading in VERBATIM:
        return ["```python", *text.splitlines(), "```"]
    return [_escaped(line) for line in text.splitlines()]


def _escaped(line: str) -> str:
    """A line of prose: what Markdown would take for a mark-up is shown as it is."""
    return re.sub(r"([*_<>])", r"\\\1", line) if not line.startswith("    ") and "`" not in line else line


def _list(checks: tuple[LoadedCheck, ...]) -> str:
    lines = ["# Checks", "", "`ddpdoctor explain` prints the same on a terminal.", ""]
    for digit, family in FAMILIES.items():
        lines += [f"## {family}", "", "| code | name | finds | looks at |", "| --- | --- | --- | --- |"]
        for check in checks:
            about = check.check
            if about.code[3] == digit:
                words = [_escaped(summary(check.documentation)), ", ".join(sees(check))]
                lines.append(f"| {about.code} | [{about.name}]({about.name}.md) | {' | '.join(words)} |")
        lines.append("")
    return "\n".join(lines)


def _reachable(text: str) -> str:
    """Turn links of a document at the root to the pages of the site."""
    return text.replace("](docs/", "](")


def _options(command: str) -> str:
    import click
    from click.testing import CliRunner

    from ddpdoctor.cli import main

    group = next(value for value in vars(main).values() if isinstance(value, click.Group))
    said = CliRunner().invoke(group, [command, "--help"], terminal_width=100, prog_name="ddpdoctor").output
    return f"```text\n{textwrap.dedent(said).rstrip()}\n```"
