"""The names of all streams, and groups of them."""

from __future__ import annotations

STREAMS = (
    "ranks",
    "groups",
    "waits",
    "wraps",
    "wrap_changes",
    "loaders",
    "passes",
    "collectives",
    "forwards",
    "backwards",
    "optimizer_steps",
    "missing_gradients",
    "buffers",
    "gradient_digests",
    "parameter_digests",
    "gradients_taken",
    "training_states",
    "unheld_parameters",
    "written_averages",
    "files",
    "stacks",
    "lines",
    "seedings",
    "random_states",
    "parts",
    "holdings",
    "settings",
    "forked_uses",
    "cpu_threads",
    "reduced_losses",
    "outsider_calls",
    "accesses",
    "device_uses",
    "device_choices",
    "checkpoint_loads",
    "state_names",
    "step_tracks",
    "call_tracks",
    "gpus",
    "host_uses",
    "optimizer_sizes",
    "bucket_layouts",
    "gauges",
    "matmul_precisions",
    "host_reads",
    "tensor_reads",
    "unused_searches",
)
"""The names of the streams of a record, which are what a check's ``needs`` is compared with."""


AVERAGING = frozenset(
    {
        "wraps",
        "wrap_changes",
        "forwards",
        "backwards",
        "missing_gradients",
        "optimizer_steps",
        "gradient_digests",
        "gradients_taken",
        "written_averages",
    }
)
"""What tells whether gradients were averaged over the ranks."""
