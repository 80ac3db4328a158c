"""Pretrained weights that are not on the disk: the model keeps the random ones that it was made with."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any
from urllib.parse import urlparse

Note = Callable[[str], None]


class NoWeights(dict):  # type: ignore[type-arg]
    """Stands for a checkpoint that was not downloaded: it holds nothing, and every part of it is of the same kind.

    ``Module.load_state_dict`` leaves the module as it is where it gets one.
    """

    def __missing__(self, key: object) -> NoWeights:
        return NoWeights()


def serve_hub(torch: Any, note: Note, directory: str) -> None:
    """``torch.hub.load_state_dict_from_url``, which torchvision's models go through, too."""
    hub = torch.hub
    load = hub.load_state_dict_from_url

    @functools.wraps(load)
    def load_state_dict_from_url(url: str, model_dir: Any = None, *arguments: Any, **options: Any) -> Any:
        name = options.get("file_name") or os.path.basename(urlparse(url).path)
        place = model_dir or os.path.join(hub.get_dir(), "checkpoints")
        if os.path.exists(os.path.join(place, name)):
            return load(url, model_dir, *arguments, **options)
        note(f"the weights {name} (random ones)")
        return NoWeights()

    hub.load_state_dict_from_url = load_state_dict_from_url


def serve_modules(torch: Any, note: Note, directory: str) -> None:
    """``load_state_dict`` of a module takes what stands for weights, and keeps its own."""
    module = torch.nn.Module
    load = module.load_state_dict

    @functools.wraps(load)
    def load_state_dict(self: Any, state_dict: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(state_dict, NoWeights):
            return torch.nn.modules.module._IncompatibleKeys([], [])
        return load(self, state_dict, *arguments, **options)

    module.load_state_dict = load_state_dict


def serve_timm(builder: Any, note: Note, directory: str) -> None:
    """What ``create_model(pretrained=True)`` of timm loads."""
    load = builder.load_pretrained

    @functools.wraps(load)
    def load_pretrained(model: Any, pretrained_cfg: Any = None, *arguments: Any, **options: Any) -> Any:
        try:
            with _OffTheNetwork():
                return load(model, pretrained_cfg, *arguments, **options)
        except Exception as error:
            if not _is_absence(error):
                raise
            name = getattr(pretrained_cfg, "architecture", None) or type(model).__name__
            note(f"timm's weights of {name} (random ones)")
            return None

    builder.load_pretrained = load_pretrained


def serve_transformers(modeling: Any, note: Note, directory: str) -> None:
    """``from_pretrained`` of a model whose configuration is there, in its directory or as an argument."""
    model_class = modeling.PreTrainedModel
    load = model_class.__dict__["from_pretrained"].__func__

    @functools.wraps(load)
    def from_pretrained(cls: Any, name: Any, *arguments: Any, **options: Any) -> Any:
        try:
            with _OffTheNetwork():
                return load(cls, name, *arguments, **options)
        except Exception as error:
            config = options.get("config")
            if not _is_absence(error) or cls.config_class is None:
                raise
            if not isinstance(config, cls.config_class):
                config = cls.config_class.from_pretrained(name)
            note(f"the weights of {os.path.basename(str(name).rstrip('/'))} (random ones)")
            return cls(config)

    model_class.from_pretrained = classmethod(from_pretrained)


class _OffTheNetwork:
    """Keeps the Hugging Face hub to what is on the disk."""

    def __enter__(self) -> None:
        import sys

        self._constants: Any = sys.modules.get("huggingface_hub.constants")
        self._before = getattr(self._constants, "HF_HUB_OFFLINE", None)
        if self._constants is not None:
            setattr(self._constants, "HF_HUB_OFFLINE", True)  # noqa: B010 - mypy has no stubs of it

    def __exit__(self, *exception: Any) -> None:
        if self._constants is not None:
            setattr(self._constants, "HF_HUB_OFFLINE", self._before)  # noqa: B010


def _is_absence(error: BaseException) -> bool:
    """Tell whether an exception, or what caused it, says that something is not on the disk and may not be fetched."""
    names = {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "URLError", "FileNotFoundError"}
    seen: Any = error
    while seen is not None:
        if {one.__name__ for one in type(seen).__mro__} & names:
            return True
        if isinstance(seen, OSError) and ("huggingface.co" in str(seen) or "no file named" in str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
