"""The checks that come with ddpdoctor, one file each, and the index that says where each one is.

The index is written by hand so that a command imports only the checks that it runs: a check's name is the name of its
module with hyphens.
"""

from __future__ import annotations

from collections.abc import Mapping

BUILT_IN: Mapping[str, str] = {
    "DDP101": "ddpdoctor.checks.data.missing_distributed_sampler",
    "DDP102": "ddpdoctor.checks.data.missing_set_epoch",
    "DDP103": "ddpdoctor.checks.data.uneven_inputs",
    "DDP201": "ddpdoctor.checks.gradients.unused_parameters",
    "DDP203": "ddpdoctor.checks.gradients.wasted_broadcast_buffers",
    "DDP209": "ddpdoctor.checks.gradients.dataparallel",
    "DDP301": "ddpdoctor.checks.collectives.rank_divergent_collective",
    "DDP304": "ddpdoctor.checks.collectives.collective_mismatch",
    "DDP305": "ddpdoctor.checks.collectives.hang",
    "DDP306": "ddpdoctor.checks.collectives.early_exit",
    "DDP312": "ddpdoctor.checks.collectives.silent_desync",
    "DDP501": "ddpdoctor.checks.launch.wrong_rank_kind",
    "DDP601": "ddpdoctor.checks.state.save_on_all_ranks",
    "DDP706": "ddpdoctor.checks.death.root_exception",
}
"""Dotted module of every check by its code."""

READ_IN_SOURCE: frozenset[str] = frozenset(
    {"DDP101", "DDP102", "DDP203", "DDP209", "DDP301", "DDP501", "DDP601"},
)
"""Codes of the checks that have ``in_source``; the others need a run and are not imported without one."""
