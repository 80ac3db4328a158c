"""The checks that come with ddpdoctor, a folder per family and a file per check.

``NAME.md`` beside ``NAME.py`` holds scripts on which the check fires and does not. A file whose name ends in ``_run``
or ``_source`` holds what one or several checks of the family read in a run or in the source; each is loaded only when
one of them asks.

``index.json`` repeats what the checks say of themselves, so that a command imports only those that it runs. It is
written by ``python -m ddpdoctor.catalogue.write_index``, and a test compares the two.
"""

from __future__ import annotations

import os

import msgspec

from ddpdoctor.check import Gone, Subject
from ddpdoctor.finding import Trouble

INDEX_FILE = os.path.join(os.path.dirname(__file__), "index.json")


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the catalogue knows of a check before it imports it."""

    module: str
    """Dotted name below this package."""
    triggers: tuple[str, ...] | None = None
    """None for a check without ``in_source``."""
    subjects: tuple[Subject, ...] = ()
    stands_for: Trouble | None = None
    after_launch: bool = False
    """Only a job itself, live or dead, shows what it looks for: neither a source nor a rehearsal does."""


with open(INDEX_FILE, "rb") as _stream:
    INDEX = msgspec.json.decode(_stream.read(), type=dict[str, Row])
"""By the code of the check."""
GONE = {
    "DDP310": Gone(name="timeout-unfit", since="0.1.0", into="DDP307"),
    "DDP402": Gone(name="poor-overlap", since="0.1.0", into="DDP401"),
    "DDP407": Gone(name="full-precision-matmul", since="0.1.0"),
}
"""By their codes the checks that there were."""
