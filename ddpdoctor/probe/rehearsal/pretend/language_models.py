"""Configurations and tokenizers of Hugging Face that are not on the disk: a small model of the kind that is named."""

from __future__ import annotations

import io
import os
import pathlib
import random
import re
import sys
from typing import Any
from urllib.parse import urlparse

from ...torch_compat import replaces
from .absence import ABSENT, Note, on_this_machine, short_name
from .tables import sentence

# Plain texts that a script reads from an address of the web, as small language models do: generated words.

TEXT_BYTES = 1 << 20
"""As long as the collected plays of Shakespeare, the text that most of these scripts read."""


def serve_urllib(module: Any, note: Note, directory: str) -> None:
    """Serve ``urllib.request.urlopen``, which ``urlretrieve`` goes through, too."""

    @replaces("urlopen", module)
    def urlopen(opened: Any, url: Any, *arguments: Any, **options: Any) -> Any:
        address = url if isinstance(url, str) else getattr(url, "full_url", "")
        if not _is_text(address):
            return opened(url, *arguments, **options)
        content = _generated(address, note)
        headers = __import__("email.message").message.Message()
        headers["Content-Type"], headers["Content-Length"] = "text/plain; charset=utf-8", str(len(content))
        return module.addinfourl(io.BytesIO(content), headers, address, 200)


def serve_requests(module: Any, note: Note, directory: str) -> None:
    """Serve ``requests.get``, alone or of a session."""

    @replaces("request", module.Session)
    def request(ask: Any, self: Any, method: Any, url: Any, *arguments: Any, **options: Any) -> Any:
        if str(method).upper() != "GET" or not _is_text(url):
            return ask(self, method, url, *arguments, **options)
        answer = module.Response()
        answer.status_code, answer.reason, answer.url, answer.encoding = 200, "OK", url, "utf-8"
        answer.raw = io.BytesIO(_generated(url, note))
        return answer


def serve_fsspec(module: Any, note: Note, directory: str) -> None:
    """Serve ``fsspec.open``."""

    @replaces("open", module)
    def open_text(opened: Any, urlpath: Any, *arguments: Any, **options: Any) -> Any:
        if not _is_text(urlpath):
            return opened(urlpath, *arguments, **options)
        made = os.path.join(directory, f"pretended-{os.getpid()}-{os.path.basename(urlparse(urlpath).path)}")
        with open(made, "wb") as file:
            file.write(_generated(urlpath, note))
        return opened(made, *arguments, **options)


def _is_text(address: Any) -> bool:
    """Return whether an address is that of a plain text on the web."""
    if not isinstance(address, str) or not address.startswith(("http://", "https://")):
        return False
    return urlparse(address).path.endswith(".txt")


def _generated(address: str, note: Note) -> bytes:
    """Return the same words for the same address."""
    note(f"the text {os.path.basename(urlparse(address).path)} of {urlparse(address).hostname} (generated words)")
    draw = random.Random(address)
    content = bytearray()
    while len(content) < TEXT_BYTES:
        content += f"{sentence(draw).capitalize()}.\n".encode()
    return bytes(content)


# Models and schedulers of diffusers that are not on the disk: small ones that fit together as the known ones do.

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


def serve_diffusers(owner: str, part: str, instead: str, module: Any, note: Note, directory: str) -> None:
    """Serve ``from_pretrained`` of the models or noise schedulers whose class is ``owner``."""

    @replaces("from_pretrained", getattr(module, owner))
    def from_pretrained(load: Any, cls: Any, name: Any = None, *arguments: Any, **options: Any) -> Any:
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


LAYERS = 2
LARGEST_WIDTH = 1024
"""Of a model whose configuration is not there: embeddings that scripts build upon (768, 1,024) keep their width …"""
NARROW, HEADS = 256, 8
"""… and wider models get this: a rehearsal of 7 billion parameters on a CPU shows no more than one of 20 million."""
LONGEST = 512
"""Tokens of a text."""
FEWEST_TOKENS = 32
"""transformers 5 makes a tokenizer of the special tokens alone where there is a configuration and no vocabulary: in
5.23 fewer than these, and at most one token that is not special (``▁``, ``.``). Those of nucleotides are as small."""
_KINDS = {"smollm": "llama", "alpaca": "llama", "vicuna": "llama", "pythia": "gpt_neox", "dialogpt": "gpt2"}
"""Names of models without their kind in them."""
_READ_BY_THE_LOADER = frozenset(
    {
        *("cache_dir", "force_download", "proxies", "token", "local_files_only", "revision", "trust_remote_code"),
        *("subfolder", "user_agent", "use_auth_token", "resume_download", "gguf_file"),
        *("_from_auto", "_from_pipeline", "_commit_hash"),
    }
)
_SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
    "bos_token": "<s>",
    "eos_token": "</s>",
}
_TEMPLATE = "{% for one in messages %}{{ one['role'] + ': ' + (one['content'] or '') + '\n' }}{% endfor %}"


def serve_configurations(module: Any, note: Note, directory: str) -> None:
    """Serve ``from_pretrained`` of a configuration, which models and tokenizers use, too."""
    base = getattr(module, "PreTrainedConfig", None) or module.PretrainedConfig

    @replaces("get_config_dict", base)
    def get_config_dict(load: Any, cls: Any, name: Any, *arguments: Any, **options: Any) -> Any:
        kind = cls.model_type or kind_of(str(name))
        if not kind:
            return load(cls, name, *arguments, **options)
        loaded = on_this_machine(load, cls, name, *arguments, **options)
        if loaded is not ABSENT:
            return loaded
        note(f"the configuration of {short_name(name)} (a small {kind})")
        left = {key: value for key, value in options.items() if key not in _READ_BY_THE_LOADER}
        return {"model_type": kind, **_small(kind)}, left


def kind_of(name: str) -> str:
    """Return the model type that a name contains, ``bert`` in ``org/bert-base-cased``; empty for none that is known."""
    mapping: Any = getattr(sys.modules.get("transformers.models.auto.configuration_auto"), "CONFIG_MAPPING_NAMES", {})
    plain = re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower()) or name
    for word, kind in _KINDS.items():
        if word in plain:
            return kind
    found = [kind for kind in mapping if re.sub(r"[^a-z0-9]", "", kind.lower()) in plain]
    return max(found, key=len, default="")


def _small(kind: str) -> dict[str, Any]:
    """Return what makes the default configuration of a kind one that a CPU trains in seconds."""
    try:
        cls = sys.modules["transformers.models.auto.configuration_auto"].CONFIG_MAPPING[kind]
        default = cls()
    except Exception:  # a kind that is not made without arguments, or that another package brings
        return {}
    wanted = {"num_hidden_layers": LAYERS}
    if int(getattr(default, "hidden_size", 0) or 0) > LARGEST_WIDTH:
        wanted.update(
            hidden_size=NARROW,
            intermediate_size=2 * NARROW,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            head_dim=NARROW // HEADS,
        )
    names = getattr(cls, "attribute_map", {})
    return {names.get(key, key): value for key, value in wanted.items() if isinstance(getattr(default, key, None), int)}


def serve_tokenizers(owner: str, module: Any, note: Note, directory: str) -> None:
    """Serve ``from_pretrained`` of tokenizers, or of what chooses one, whose class is ``owner``."""

    @replaces("from_pretrained", getattr(module, owner))
    def from_pretrained(load: Any, cls: Any, name: Any, *arguments: Any, **options: Any) -> Any:
        loaded = on_this_machine(load, cls, name, *arguments, **options)
        if loaded is not ABSENT and _has_vocabulary(loaded):
            return loaded
        note(f"the tokenizer of {short_name(name)} (one token a byte)")
        return _tokenizer(kind_of(str(name)), options)


def _has_vocabulary(tokenizer: Any) -> bool:
    """Return whether a tokenizer was read from the disk, however small, and is not one of the special tokens alone."""
    try:
        if len(tokenizer) >= FEWEST_TOKENS:
            return True
        return len(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)) > 1
    except Exception:  # one of the script's own, which has no such methods
        return True


def _tokenizer(kind: str, options: dict[str, Any]) -> Any:
    """Return a tokenizer of bytes, with numbers below those of any vocabulary."""
    tokenizers: Any = __import__("tokenizers")
    words = [*_SPECIAL.values(), *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {word: number for number, word in enumerate(words)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    if "bert" in kind or "electra" in kind:
        ends = [(word, vocabulary[word]) for word in ("[CLS]", "[SEP]")]
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
        )
    made = sys.modules["transformers"].PreTrainedTokenizerFast(
        tokenizer_object=inner,
        model_max_length=LONGEST,
        padding_side=options.get("padding_side", "right"),
        model_input_names=["input_ids", *(["token_type_ids"] if kind == "bert" else []), "attention_mask"],
        **_SPECIAL,
    )
    made.chat_template = _TEMPLATE
    return made


# Pretrained weights that are not on the disk: the model keeps the random ones that it was made with.

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

    @replaces("load_state_dict_from_url", hub)
    def load_state_dict_from_url(load: Any, url: str, model_dir: Any = None, *arguments: Any, **options: Any) -> Any:
        name = options.get("file_name") or os.path.basename(urlparse(url).path)
        place = model_dir or os.path.join(hub.get_dir(), "checkpoints")
        if os.path.exists(os.path.join(place, name)):
            return load(url, model_dir, *arguments, **options)
        note(f"the weights {name} (random ones)")
        return NoWeights()

    @replaces("list", hub)
    def list_models(listed: Any, github: Any, *arguments: Any, **options: Any) -> Any:
        if os.path.isdir(os.path.join(hub.get_dir(), str(github).replace("/", "_").replace(":", "_"))):
            return listed(github, *arguments, **options)
        note(f"the models of {str(github).partition(':')[0]} on torch.hub (none)")
        return []


def serve_modules(torch: Any, note: Note, directory: str) -> None:
    """Make ``load_state_dict`` of a module take what stands for weights, and keep its own."""
    module = torch.nn.Module

    @replaces("load_state_dict", module)
    def load_state_dict(load: Any, self: Any, state_dict: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(state_dict, NoWeights):
            return torch.nn.modules.module._IncompatibleKeys([], [])
        return load(self, state_dict, *arguments, **options)


def serve_checkpoints(torch: Any, note: Note, names: frozenset[str]) -> None:
    """Serve ``torch.load`` of files that are not there, by their names in the script, which may ask for them first."""
    exists = os.path.exists

    @replaces("load", torch, torch.serialization)
    def load_or_nothing(load: Any, file: Any, *arguments: Any, **options: Any) -> Any:
        name = os.fspath(file) if isinstance(file, (str, os.PathLike)) else ""
        if name not in names or exists(name):
            return load(file, *arguments, **options)
        note(f"the weights {os.path.basename(name)} (random ones)")
        return NoWeights()

    def is_there(ask: Any, path: Any, *arguments: Any, **options: Any) -> Any:
        return str(path) in names or ask(path, *arguments, **options)

    for owner, question in _IS_THERE:
        replaces(question, owner)(is_there)


def serve_timm(builder: Any, note: Note, directory: str) -> None:
    """Serve what ``create_model(pretrained=True)`` of timm loads."""

    @replaces("load_pretrained", builder)
    def load_pretrained(load: Any, model: Any, pretrained_cfg: Any = None, *arguments: Any, **options: Any) -> Any:
        loaded = on_this_machine(load, model, pretrained_cfg, *arguments, **options)
        if loaded is not ABSENT:
            return loaded
        name = getattr(pretrained_cfg, "architecture", None) or type(model).__name__
        note(f"timm's weights of {name} (random ones)")
        return None


def serve_transformers(modeling: Any, note: Note, directory: str) -> None:
    """Serve ``from_pretrained`` of a model with a configuration that is there, in its directory or as an argument."""
    model_class = modeling.PreTrainedModel

    @replaces("from_pretrained", model_class)
    def from_pretrained(load: Any, cls: Any, name: Any, *arguments: Any, **options: Any) -> Any:
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


def _of_configuration(config_class: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a model that are meant for its configuration (``num_labels``)."""
    try:
        default = config_class()
    except Exception:  # one that is not made without arguments
        return {}
    return {name: value for name, value in options.items() if hasattr(default, name) and name not in _NO_SETTINGS}
