"""Groups of streams that several checks need."""

from __future__ import annotations

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
"""What shows whether gradients were averaged over the ranks."""
