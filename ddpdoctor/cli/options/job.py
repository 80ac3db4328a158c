"""A command line whose script takes all that is not an option of ours: ``profile train.py --lr 0.1 --no-tui``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ddpdoctor.cli.options.command import SCRIPT_ARGUMENTS

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

SCRIPT = "ddpdoctor.script"
"""Key in ``Context.meta`` of the script's path; absent when none is named."""


class JobCommand(click.Command):
    """A command that starts a script, or whatever stands behind ``--``.

    Options of ours count before the script and behind it; other words behind it, and all behind ``--``, are its own.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Divide the words into ours and the script's, and parse ours."""
        divide = args.index("--") if "--" in args else len(args)
        ours, script, theirs = self._divided(args[:divide])
        ctx.meta[SCRIPT_ARGUMENTS] = (*theirs, *args[divide + 1 :])
        if script is not None:
            ctx.meta[SCRIPT] = script
        return super().parse_args(ctx, ours)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Show in the usage what may follow the options."""
        return [*super().collect_usage_pieces(ctx), "[SCRIPT [ARGUMENT]... | -- COMMAND...]"]

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete our options, and files: the script, or what its command names."""
        from click.shell_completion import CompletionItem

        return super().shell_complete(ctx, incomplete) or [CompletionItem(incomplete, type="file")]

    def _divided(self, words: list[str]) -> tuple[list[str], str | None, list[str]]:
        valued, flags = self._names()
        ours: list[str] = []
        theirs: list[str] = []
        script: str | None = None
        module = False
        left = list(words)
        while left:
            word = left.pop(0)
            name = word.partition("=")[0] if word.startswith("--") else word
            if name in flags or name in valued:
                ours.append(word)
                if name in valued and "=" not in word and left:
                    ours.append(left.pop(0))
                module = module or name in ("-m", "--module")
            elif script is not None or (module and not word.startswith("-")):
                theirs.append(word)
            elif module or word.startswith("-"):
                (theirs if module else ours).append(word)
            else:
                script = word
        return ours, script, theirs

    def _names(self) -> tuple[set[str], set[str]]:
        """Return the options that take a value, and those that take none."""
        options = [parameter for parameter in self.params if isinstance(parameter, click.Option)]
        valued = {name for option in options if not option.is_flag for name in option.opts}
        return valued, {name for option in options if option.is_flag for name in option.opts}
