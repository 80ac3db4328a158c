"""Models and schedulers of diffusers that are not on the disk: small ones that fit together as the known ones do."""

from __future__ import annotations

import functools
from typing import Any

from .absence import ABSENT, Note, on_this_machine, short_name

_BLOCKS = 4
"""Of an encoder of Stable Diffusion: a picture is eight times as wide as what stands for it."""
_CHANNELS = (32,) * _BLOCKS
"""The fewest that its group norms of 32 groups take."""
_TEXT_WIDTH = 512
"""Of the text encoder that is pretended beside it: CLIP's own default."""
_SMALL: dict[str, dict[str, Any]] = {
    "AutoencoderKL": {
        "down_block_types": ("DownEncoderBlock2D",) * _BLOCKS,
        "up_block_types": ("UpDecoderBlock2D",) * _BLOCKS,
        "block_out_channels": _CHANNELS,
    },
    "UNet2DConditionModel": {
        "block_out_channels": _CHANNELS,
        "layers_per_block": 1,
        "cross_attention_dim": _TEXT_WIDTH,
    },
}
"""What makes the default of a class a small model of the usual shape."""


def serve_models(module: Any, note: Note, directory: str) -> None:
    """Serve ``from_pretrained`` of a model."""
    _serve(module.ModelMixin, note, "weights", "random ones")


def serve_schedulers(module: Any, note: Note, directory: str) -> None:
    """Serve ``from_pretrained`` of a noise scheduler."""
    _serve(module.SchedulerMixin, note, "settings", "their defaults")


def _serve(owner: Any, note: Note, part: str, instead: str) -> None:
    load = owner.__dict__["from_pretrained"].__func__

    @functools.wraps(load)
    def from_pretrained(cls: Any, name: Any = None, *arguments: Any, **options: Any) -> Any:
        loaded = on_this_machine(load, cls, name, *arguments, **options)
        if loaded is not ABSENT:
            return loaded
        made = cls(**_SMALL.get(cls.__name__, {}))
        note(f"the {part} of {cls.__name__} of {short_name(name)} ({instead})")
        if hasattr(made, "eval"):
            made.eval()
            dtype = options.get("torch_dtype")
            made = made.to(dtype) if type(dtype).__name__ == "dtype" else made
        return (made, {}) if options.get("return_unused_kwargs") else made

    owner.from_pretrained = classmethod(from_pretrained)
