"""The profiler without a GPU: its CPU half, which is what there is to measure."""

from __future__ import annotations

import functools
from typing import Any


def install(torch: Any) -> None:
    """Take the CUDA activity out of what is asked of ``torch.profiler``."""
    cpu = torch.profiler.ProfilerActivity.CPU
    profile = torch.profiler.profile
    construct = profile.__init__

    @functools.wraps(construct)
    def __init__(self: Any, *, activities: Any = None, **options: Any) -> None:
        options.pop("use_cuda", None)
        construct(self, activities=[cpu], **options)

    profile.__init__ = __init__
    older = torch.autograd.profiler.profile
    construct_older = older.__init__

    @functools.wraps(construct_older)
    def __init_older__(self: Any, *arguments: Any, **options: Any) -> None:
        options.pop("use_cuda", None)
        if options.get("use_device") == "cuda":
            options["use_device"] = None
        construct_older(self, *arguments, **options)

    older.__init__ = __init_older__
