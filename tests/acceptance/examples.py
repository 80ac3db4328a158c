"""What ``ddpdoctor check`` says of the bundled examples."""

from __future__ import annotations

EXAMPLES = {
    "healthy.py": (0, "clean", "completed", []),
    "missing_sampler.py": (1, "findings", "completed", [("DDP101", "error", ["rehearsal", "source"])]),
    "rank_divergent_hang.py": (1, "findings", "stopped", [("DDP301", "error", ["rehearsal", "source"])]),
    "silent_desync.py": (1, "findings", "stopped", [("DDP302", "error", ["rehearsal", "source"])]),
    "unused_parameters.py": (1, "findings", "failed", [("DDP201", "error", ["rehearsal", "source"])]),
    "wasted_buffers.py": (1, "findings", "completed", [("DDP203", "warning", ["rehearsal", "source"])]),
}
"""Exit code, verdict, how the rehearsal ends, and the code, severity and basis of each finding."""
