"""``ddpdoctor explain``: what a check means, from its own documentation."""

from __future__ import annotations

import click

from ddpdoctor.catalogue.registry import find, load, read_catalogue
from ddpdoctor.cli.options.command import checks as complete_checks
from ddpdoctor.cli.options.command import help_option
from ddpdoctor.errors import UsageError
from ddpdoctor.report import explanation, streams


@click.command(add_help_option=False)
@click.argument("check", required=False, shell_complete=complete_checks)
@click.option("--all", "every", is_flag=True, help="Explain every check.")
@click.option(
    "--output-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Text or JSON."
)
@help_option()
def explain(check: str | None, every: bool, output_format: str) -> None:
    """Explain CHECK, a code or a name; without one, list all checks."""
    catalogue = read_catalogue()
    if check is not None and every:
        raise UsageError(f"either {check} or --all, not both")
    for note in catalogue.notes:
        streams.say(f"note: {note}")
    if check is not None:
        checks = [load(find(catalogue, check))]
    else:
        checks = [load(entry) for entry in catalogue.entries]
    if output_format == "json":
        streams.write_result(explanation.as_json(checks))
    elif check is None and not every:
        streams.write_result(explanation.as_list(checks))
    else:
        streams.write_result(explanation.as_text(checks))
