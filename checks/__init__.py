"""The checks that come with ddpdoctor, a folder per family and a file per check.

``NAME.md`` beside ``NAME.py`` holds scripts on which the check fires and does not. A file whose name ends in ``_run``
or ``_source`` holds what one or several checks of the family read in a run or in the source; each is loaded only when
one of them asks.

``index.py`` repeats what the checks say of themselves, so that a command imports only those that it runs. It is
written by ``python -m ddpdoctor.catalogue.write_index``, and a test compares the two.
"""

from __future__ import annotations

from ddpdoctor.checks.index import AFTER_LAUNCH, BUILT_IN, READ_IN_SOURCE, STANDS_FOR, SUBJECTS

__all__ = ["AFTER_LAUNCH", "BUILT_IN", "READ_IN_SOURCE", "STANDS_FOR", "SUBJECTS"]
