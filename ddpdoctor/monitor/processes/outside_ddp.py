"""Recognises scripts whose gradients are reduced by a library of its own, beside DistributedDataParallel."""

from __future__ import annotations

import re

from ddpdoctor.files.untrusted import read_start

_MOST_BYTES = 1_000_000
_LIBRARIES = (
    ("horovod", "Horovod"),
    ("smdistributed.modelparallel", "SageMaker's model-parallel library"),
    ("smdistributed.dataparallel.torch.parallel", "SageMaker's data-parallel library"),
    ("byteps", "BytePS"),
)
"""Modules and what people call them. SageMaker's newer data-parallel library is a backend of torch's process groups
(``torch_smddp``): DistributedDataParallel runs on it, and is measured."""
_LAUNCHERS = {"horovodrun": "Horovod", "bpslaunch": "BytePS"}


def library_of(script: str, program: str) -> str:
    """Return what people call the library that a script needs, or whose launcher starts it; empty where there is none.

    A script needs what it imports before anything else is decided, in column 0: an import under ``try`` or ``if`` is
    of a library that a DDP job may do without.
    """
    if program in _LAUNCHERS:
        return _LAUNCHERS[program]
    try:
        text = read_start(script, _MOST_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""
    return next((name for module, name in _LIBRARIES if _imports(module, text)), "")


def sentence(library: str) -> str:
    """Say that nothing is measured, and what of ddpdoctor works nevertheless; without a full stop."""
    return (
        f"{library} reduces the gradients of this script, not DistributedDataParallel, so its steps are not measured; "
        "`ddpdoctor check --static` reads it, `autopsy` explains its logs, and `autopsy --live` where its processes "
        "stand"
    )


def _imports(module: str, text: str) -> bool:
    return re.search(rf"^(?:import|from)[ \t]+{re.escape(module)}(?![\w])", text, re.MULTILINE) is not None
