"""Tests on several ranks: the pytest plugin, the warm ranks that it keeps, and what runs inside of them.

``plugin`` is loaded into every pytest of an environment that has ddpdoctor, ``on_ranks`` once a test has the mark.
``warm_process``, ``warm_rank``, ``rank``, ``hooks`` and ``modules`` run in the ranks.
"""
