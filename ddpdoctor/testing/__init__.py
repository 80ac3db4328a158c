"""Tests on several ranks: the pytest plugin, the warm ranks that it keeps, and what runs inside of them.

``plugin`` is loaded into every pytest of an environment that has ddpdoctor, and imports the standard library and pytest
only. ``warm_process`` and ``rank`` run in the ranks.
"""
