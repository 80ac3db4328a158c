"""What the index says of the built-in checks, by their codes."""

from __future__ import annotations

from ddpdoctor.checks import INDEX

BUILT_IN = {code: f"ddpdoctor.checks.{row.module}" for code, row in INDEX.items()}
"""Dotted module of every check."""
READ_IN_SOURCE = {code: row.triggers for code, row in INDEX.items() if row.triggers is not None}
"""Trigger words of the checks that have ``in_source``."""
STANDS_FOR = {code: row.stands_for for code, row in INDEX.items() if row.stands_for is not None}
