"""``ddpdoctor completion``: the script with which a shell completes commands, options, runs and checks.

The script asks ``ddpdoctor`` itself, by an environment variable that Click reads, so that it never goes out of date.
"""

from __future__ import annotations

import click

from ddpdoctor.cli.options.command import help_option
from ddpdoctor.errors import UsageError
from ddpdoctor.report import streams

SHELLS = ("bash", "zsh", "fish")


@click.command(add_help_option=False)
@click.argument("shell", type=click.Choice(SHELLS))
@help_option()
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell, to be read by its start-up file.

    For bash: eval "$(ddpdoctor completion bash)" in ~/.bashrc, and alike for zsh; for fish: ddpdoctor completion fish >
    ~/.config/fish/completions/ddpdoctor.fish.
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    root = ctx.find_root()
    if kind is None or root.command is None:
        raise UsageError(f"there is no completion for {shell}")
    made = kind(root.command, {}, "ddpdoctor", "_DDPDOCTOR_COMPLETE")
    streams.write_result(made.source_template % made.source_vars() + "\n")
