"""Settings of the whole suite.

The suite judges a commit: the same commit must get the same answer, so generated examples are the same in every run.
New ones are searched for with ``python -m pytest --hypothesis-profile search``.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.register_profile("search", max_examples=20_000, deadline=None)
settings.load_profile("repeatable")
