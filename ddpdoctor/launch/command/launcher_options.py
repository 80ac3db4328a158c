"""Takes the options of a launcher apart, as its own parser would, up to the script that it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ddpdoctor.errors import UsageError


class Syntax(msgspec.Struct, frozen=True, kw_only=True):
    """The options that a launcher knows; in long ones ``_`` and ``-`` are the same."""

    name: str
    """Of the launcher, as the user writes it."""
    valued: frozenset[str]
    """Options that take a value."""
    flags: frozenset[str]
    """Options that take none."""
    families: tuple[str, ...] = ()
    """Beginnings of further options, all of which take a value."""
    short: dict[str, str] = {}
    """Long names of the short options."""


class Parsed(msgspec.Struct, frozen=True, kw_only=True):
    """The options that a command line holds and what it starts."""

    options: dict[str, str]
    """By long name with ``-``; a flag has the value ``true``."""
    rest: tuple[str, ...]
    """The script and its arguments."""

    def count(self, option: str, launcher: str) -> int | None:
        """Return the positive number that an option has; None when it is absent. Raises UsageError for anything
        else.
        """
        text = self.options.get(option)
        if text is None:
            return None
        if not text.isdigit() or int(text) == 0:
            raise UsageError(f"{launcher}: {option} {text} is not a number of processes")
        return int(text)


def names(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


def parse_options(words: Sequence[str], syntax: Syntax) -> Parsed:
    """Take apart what follows the launcher's name.

    Raises UsageError for an option that the launcher does not have, for one without its value, and when no script is
    named.
    """
    options: dict[str, str] = {}
    left = list(words)
    while left and left[0].startswith("-") and left[0] != "-":
        word = left.pop(0)
        if word == "--":
            break
        name, given, value = _split(word, syntax)
        if name in syntax.flags:
            if given:
                raise UsageError(f"{syntax.name}: {name} takes no value", f"It was given as `{word}`.")
            options[name] = "true"
        elif given:
            options[name] = value
        elif left:
            options[name] = left.pop(0)
        else:
            raise UsageError(f"{syntax.name}: {name} needs a value")
    if not left:
        raise UsageError(
            f"{syntax.name} has no script",
            f"Write it as you launch it: `{syntax.name} ... train.py --its options`.",
        )
    return Parsed(options=options, rest=tuple(left))


def _split(word: str, syntax: Syntax) -> tuple[str, bool, str]:
    """Long name of an option, whether its value is in the same word, and the value."""
    if not word.startswith("--"):
        name = syntax.short.get(word[:2])
        if name is None:
            raise _unknown(word, syntax)
        return name, len(word) > 2, word[2:].removeprefix("=")
    written, equals, value = word.partition("=")
    name = written.replace("_", "-")
    known = syntax.valued | syntax.flags
    if name not in known and not name.startswith(syntax.families):
        longer = [option for option in known if option.startswith(name)]
        if len(longer) != 1:
            raise _unknown(written, syntax, longer)
        name = longer[0]
    return name, bool(equals), value


def _unknown(word: str, syntax: Syntax, meant: Sequence[str] = ()) -> UsageError:
    from difflib import get_close_matches

    near = sorted(meant) or get_close_matches(word.replace("_", "-"), sorted(syntax.valued | syntax.flags), n=1)
    hint = f"Did you mean {' or '.join(near[:3])}? " if near else ""
    return UsageError(f"{syntax.name} has no option {word}", f"{hint}Options of the script itself go after the script.")


# Reads the command line of Lightning's ``fabric run``, which lets torch's launcher start the ranks.

NAME = "fabric run"
_VALUED = names(
    "--accelerator --strategy --devices --num-nodes --node-rank --main-address --main-port --precision"
)  # fmt: skip
_TOLD = ("accelerator", "strategy", "precision")
"""Options that a Fabric object reads from the environment; the ranks are as many as a rehearsal starts."""


class FabricRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a ``fabric run`` starts."""

    parsed: Parsed
    ranks: int | None
    """Of the whole job; None when there are as many as devices."""
    nodes: int
    environment: Mapping[str, str]
    """What its processes read of it."""


def parse_fabric(words: Sequence[str]) -> FabricRun:
    """Take apart what follows ``fabric run``; ``fabric run model`` is what it was called before Lightning 2.4.

    Its options may stand behind the script, too, and what it does not know belongs to the script. Raises UsageError
    for a wrong command line, and when the job is no DistributedDataParallel job.
    """
    options: dict[str, str] = {}
    rest: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            rest += left
            break
        written, equals, value = word.partition("=")
        name = written.replace("_", "-")
        if name not in _VALUED:
            rest.append(word)
        elif not equals and not left:
            raise UsageError(f"{NAME}: {written} needs a value")
        else:
            options[name] = value if equals else left.pop(0)
    if rest[:1] == ["model"]:
        rest.pop(0)
    if not rest or rest[0].startswith("-"):
        raise UsageError(f"{NAME} has no script", f"Write it as you launch it: `{NAME} train.py --devices 2`.")
    strategy = options.get("--strategy", "auto").lower()
    if not strategy.startswith(("ddp", "auto")):
        raise UsageError(
            f"{NAME} starts a job with the strategy {strategy}: only DDP jobs are examined",
            "`--static` with the script alone still reads its source.",
        )
    parsed = Parsed(options=options, rest=tuple(rest))
    nodes = parsed.count("--num-nodes", NAME) or 1
    per_node = _devices(options.get("--devices", "1"))
    told = {f"LT_{name.upper()}": options[f"--{name}"] for name in _TOLD if f"--{name}" in options}
    return FabricRun(
        parsed=parsed,
        ranks=per_node * nodes if per_node else None,
        nodes=nodes,
        environment={"LT_CLI_USED": "1", **told},
    )


def _devices(text: str) -> int | None:
    """Return how many devices a number or a list of them names; None for as many as there are."""
    listed = [entry for entry in text.strip("[]").split(",") if entry.strip()]
    if len(listed) > 1:
        return len(listed)
    if text in ("auto", "-1"):
        return None
    if text.isdigit() and int(text) > 0:
        return int(text)
    return 1
