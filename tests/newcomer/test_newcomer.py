"""Every command that the documents print is one that there is; ``python -m tests.newcomer`` does them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ddpdoctor.cli.main import ddpdoctor
from tests.check_command import with_our_tree
from tests.newcomer.excerpts import ROWS, compared, shown
from tests.newcomer.printed import ROOT, printed, words_of
from tests.newcomer.table import NOT_DONE, done

PRINTED = printed()


def test_the_documents_print_commands() -> None:
    assert len(PRINTED) > 40
    assert {words_of(one.command)[0] for one in PRINTED} >= {"check", "gate", "profile", "autopsy", "what-if", "runs"}


@pytest.mark.parametrize("command", [one.command for one in PRINTED])
def test_a_printed_command_is_understood(command: str) -> None:
    name, *arguments = words_of(command)
    context = click.Context(ddpdoctor, info_name="ddpdoctor")
    found = ddpdoctor.get_command(context, name)
    assert found is not None, f"there is no command {name}"
    try:
        found.make_context(name, arguments, parent=context)
    except click.MissingParameter:
        pass  # A sentence may name a command without its arguments.
    except click.UsageError as error:
        raise AssertionError(f"{command}: {error.format_message()}") from error


def test_an_option_that_there_is_not_would_be_noticed() -> None:
    with pytest.raises(AssertionError, match="o such option"):
        test_a_printed_command_is_understood("ddpdoctor compare a b --allow 5%")


def test_what_is_not_done_is_printed_and_has_a_reason() -> None:
    assert set(NOT_DONE) <= {one.command for one in PRINTED}
    assert all(done(command) is None for command in NOT_DONE)


def test_every_block_beside_the_tutorial_has_its_command() -> None:
    pages = {"equivalence", "fsdp", "nan", "resume"}
    assert {(row.page, row.block) for row in ROWS} == {(page, n) for page in pages for n in range(len(shown(page)))}


def test_a_page_shows_what_is_printed(tmp_path: Path) -> None:
    tool = tmp_path / "ddpdoctor"
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ddpdoctor "$@"\n')
    tool.chmod(0o755)
    around = with_our_tree(XDG_STATE_HOME=str(tmp_path / "state"))
    around["PATH"] = f"{tmp_path}:{Path(sys.executable).parent}:{around['PATH']}"
    told = list(compared([row for row in ROWS if row.quick], tmp_path, around))
    assert [(page, one.missing) for page, one in told] == [("nan", ()), ("fsdp", ())]


def test_the_problem_matcher_of_an_editor_reads_each_line_of_a_finding(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "editors.md").read_text()
    block = re.search(r"```json\n(.*?)```", page, re.S)
    assert block is not None
    task = json.loads(block[1])["tasks"][0]
    pattern = task["problemMatcher"]["pattern"]
    file = tmp_path / "train.py"
    file.write_text((ROOT / "examples" / "rank_divergent_hang.py").read_text())
    words = [word.replace("${file}", str(file)) for word in task["args"]]
    done = subprocess.run([sys.executable, "-m", "ddpdoctor", *words], capture_output=True, text=True, cwd=tmp_path)
    found = [re.search(pattern["regexp"], line) for line in done.stdout.splitlines()]
    assert found
    for match in found:
        assert match is not None, done.stdout
        assert (tmp_path / match[pattern["file"]]).is_file()
        assert match[pattern["code"]].startswith("DDP")
