"""Pretrained weights that are not on the disk: the model keeps the random ones that it was made with."""

from __future__ import annotations

import functools
import os
import pathlib
from typing import Any
from urllib.parse import urlparse

from .absence import ABSENT, Note, on_this_machine, short_name

_NO_SETTINGS = frozenset({"config", "dtype", "torch_dtype", "from_pretrained"})
"""Options of a model with names that a configuration has, too."""
_IS_THERE = ((os.path, "exists"), (os.path, "isfile"), (pathlib.Path, "exists"), (pathlib.Path, "is_file"))


class NoWeights(dict[Any, Any]):
    """A checkpoint that was not downloaded: it holds nothing, and every part of it is of the same kind.

    ``Module.load_state_dict`` leaves the module as it is where it gets one.
    """

    def __missing__(self, key: object) -> NoWeights:
        return NoWeights()


def serve_hub(torch: Any, note: Note, directory: str) -> None:
    """Serve ``torch.hub.load_state_dict_from_url``, which torchvision's models use, and ``torch.hub.list``."""
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
    listed = hub.list

    @functools.wraps(listed)
    def list_models(github: Any, *arguments: Any, **options: Any) -> Any:
        if os.path.isdir(os.path.join(hub.get_dir(), str(github).replace("/", "_").replace(":", "_"))):
            return listed(github, *arguments, **options)
        note(f"the models of {str(github).partition(':')[0]} on torch.hub (none)")
        return []

    hub.list = list_models


def serve_modules(torch: Any, note: Note, directory: str) -> None:
    """Make ``load_state_dict`` of a module take what stands for weights, and keep its own."""
    module = torch.nn.Module
    load = module.load_state_dict

    @functools.wraps(load)
    def load_state_dict(self: Any, state_dict: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(state_dict, NoWeights):
            return torch.nn.modules.module._IncompatibleKeys([], [])
        return load(self, state_dict, *arguments, **options)

    module.load_state_dict = load_state_dict


def serve_checkpoints(torch: Any, note: Note, names: frozenset[str]) -> None:
    """Serve ``torch.load`` of files that are not there, by their names in the script, which may ask for them first."""
    load, exists = torch.load, os.path.exists

    @functools.wraps(load)
    def load_or_nothing(file: Any, *arguments: Any, **options: Any) -> Any:
        name = os.fspath(file) if isinstance(file, (str, os.PathLike)) else ""
        if name not in names or exists(name):
            return load(file, *arguments, **options)
        note(f"the weights {os.path.basename(name)} (random ones)")
        return NoWeights()

    torch.load = torch.serialization.load = load_or_nothing
    for owner, question in _IS_THERE:
        _affirm(owner, question, names)


def _affirm(owner: Any, question: str, names: frozenset[str]) -> None:
    """Answer that a file of weights is there."""
    ask = getattr(owner, question)

    @functools.wraps(ask)
    def is_there(path: Any, *arguments: Any, **options: Any) -> bool:
        return str(path) in names or ask(path, *arguments, **options)

    setattr(owner, question, is_there)


def serve_timm(builder: Any, note: Note, directory: str) -> None:
    """Serve what ``create_model(pretrained=True)`` of timm loads."""
    load = builder.load_pretrained

    @functools.wraps(load)
    def load_pretrained(model: Any, pretrained_cfg: Any = None, *arguments: Any, **options: Any) -> Any:
        loaded = on_this_machine(load, model, pretrained_cfg, *arguments, **options)
        if loaded is not ABSENT:
            return loaded
        name = getattr(pretrained_cfg, "architecture", None) or type(model).__name__
        note(f"timm's weights of {name} (random ones)")
        return None

    builder.load_pretrained = load_pretrained


def serve_transformers(modeling: Any, note: Note, directory: str) -> None:
    """Serve ``from_pretrained`` of a model with a configuration that is there, in its directory or as an argument."""
    model_class = modeling.PreTrainedModel
    load = model_class.__dict__["from_pretrained"].__func__

    @functools.wraps(load)
    def from_pretrained(cls: Any, name: Any, *arguments: Any, **options: Any) -> Any:
        if cls.config_class is None:
            return load(cls, name, *arguments, **options)
        loaded = on_this_machine(load, cls, name, *arguments, **options)
        if loaded is not ABSENT:
            return loaded
        config = options.get("config")
        if not isinstance(config, cls.config_class):
            config = cls.config_class.from_pretrained(name, **_of_configuration(cls.config_class, options))
        note(f"the weights of {short_name(name)} (random ones)")
        dtype = options.get("dtype", options.get("torch_dtype"))
        model = cls(config)
        return model.to(dtype) if type(dtype).__name__ == "dtype" else model

    model_class.from_pretrained = classmethod(from_pretrained)


def _of_configuration(config_class: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a model that are meant for its configuration (``num_labels``)."""
    try:
        default = config_class()
    except Exception:  # one that is not made without arguments
        return {}
    return {name: value for name, value in options.items() if hasattr(default, name) and name not in _NO_SETTINGS}
