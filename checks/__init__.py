"""The checks that come with ddpdoctor, a folder or a file each.

What belongs to one check alone lies beside it: ``source.py`` (its half of the source), ``run.py`` (its half of the
run), ``fix.py`` (the edit that it offers), ``cases.md`` (scripts on which it fires and does not). ``shared`` holds what
several checks of a family use.

``index.py`` repeats what the checks say of themselves, so that a command imports only those that it runs. It is
written by ``python -m ddpdoctor.catalogue.write_index``, and a test compares the two.
"""

from __future__ import annotations

from ddpdoctor.checks.index import AFTER_LAUNCH, BUILT_IN, READ_IN_SOURCE, STANDS_FOR, SUBJECTS

__all__ = ["AFTER_LAUNCH", "BUILT_IN", "READ_IN_SOURCE", "STANDS_FOR", "SUBJECTS"]
