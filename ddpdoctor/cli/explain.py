"""``ddpdoctor explain`` and ``ddpdoctor completion``: what a check means, and what a shell completes."""

from __future__ import annotations

from collections.abc import Callable

import click

from ddpdoctor.catalogue.registry import described, find, gone_notes, read_catalogue
from ddpdoctor.cli.options import checks as complete_checks
from ddpdoctor.cli.options import help_option
from ddpdoctor.cli.output import LIST_FORMATS, RunOutput, file_options, run_output_options
from ddpdoctor.errors import UsageError
from ddpdoctor.report import explanation, streams

SHELLS = ("bash", "zsh", "fish")
"""Their completion scripts ask ``ddpdoctor`` itself, by a variable that Click reads, and so never go out of date."""


@click.command(add_help_option=False)
@click.argument("check", required=False, shell_complete=complete_checks)
@click.option("--all", "every", is_flag=True, help="Explain every check.")
@run_output_options(formats=LIST_FORMATS)
@help_option()
def explain(check: str | None, every: bool, wanted: RunOutput) -> None:
    """Explain CHECK, a code or a name; without one, list all checks."""
    catalogue = read_catalogue()
    if check is not None and every:
        raise UsageError(f"either {check} or --all, not both")
    for note in (*catalogue.notes, *gone_notes(catalogue, filter(None, (check,)))):
        streams.say(f"note: {note}")
    if check is not None:
        checks = [described(find(catalogue, check))]
    else:
        checks = [described(entry) for entry in catalogue.entries]
    as_text = explanation.as_list if check is None and not every else explanation.as_text

    def render(kind: str, width: int, colour: bool) -> str:  # It has neither lines to break nor colours.
        return explanation.as_json(checks) if kind == "json" else as_text(checks)

    wanted.write_rendered(render)


@click.command(add_help_option=False)
@click.argument("shell", type=click.Choice(SHELLS))
@file_options
@help_option()
@click.pass_context
def completion(ctx: click.Context, shell: str, write: Callable[[str], None]) -> None:
    """Print the script with which bash, zsh or fish completes commands, runs and checks.

    For bash: eval "$(ddpdoctor completion bash)" in ~/.bashrc, and alike for zsh; for fish: ddpdoctor completion fish >
    ~/.config/fish/completions/ddpdoctor.fish.
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    root = ctx.find_root()
    if kind is None or root.command is None:
        raise UsageError(f"there is no completion for {shell}")
    made = kind(root.command, {}, "ddpdoctor", "_DDPDOCTOR_COMPLETE")
    write(made.source_template % made.source_vars() + "\n")
