"""Takes the options of a launcher apart, as its own parser would, up to the script that it starts."""

from __future__ import annotations

from collections.abc import Sequence

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
