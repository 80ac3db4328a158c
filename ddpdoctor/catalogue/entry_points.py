"""Looks for checks that other packages offer through the entry-point group ``ddpdoctor.checks``.

Asking ``importlib.metadata`` costs about 30 ms with 60 packages installed, because it parses every one of them. Nearly
no one has third-party checks, so the files are searched for the name of the group first, which costs about 1 ms.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from types import ModuleType

import msgspec

GROUP = "ddpdoctor.checks"


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A module that a package offers as a check; not yet imported."""

    name: str
    value: str
    distribution: str
    load: Callable[[], ModuleType]


def third_party_modules() -> tuple[Offer, ...]:
    """List the modules on offer, by name; imports none of them."""
    if not any(map(may_offer, sys.path)):
        return ()
    from importlib.metadata import entry_points

    offers = (
        Offer(
            name=point.name,
            value=point.value,
            distribution=point.dist.name if point.dist else "an unknown package",
            load=point.load,
        )
        for point in entry_points(group=GROUP)
    )
    return tuple(sorted(offers, key=lambda offer: (offer.name, offer.value)))


def may_offer(path_entry: str) -> bool:
    """Return whether a package below this entry of ``sys.path`` names the group; unsure (a zip file) counts as yes."""
    directory = path_entry or os.curdir
    if os.path.isfile(directory):
        return True
    return any(_names_group(path) for path in _entry_point_files(directory))


def _entry_point_files(directory: str) -> Iterable[str]:
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if entry.name.endswith((".dist-info", ".egg-info"))]
    except OSError:
        return ()
    return [os.path.join(directory, name, "entry_points.txt") for name in names]


def _names_group(path: str) -> bool:
    try:
        with open(path, "rb") as stream:
            return GROUP.encode() in stream.read()
    except OSError:
        return False
