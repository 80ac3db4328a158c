"""Every command that the documents print is one that there is; ``python -m tests.newcomer`` does them."""

from __future__ import annotations

import click
import pytest

from ddpdoctor.cli.main import ddpdoctor
from tests.newcomer.printed import printed, words_of
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
