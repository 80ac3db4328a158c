"""Tables of ``datasets`` that are not on the disk, with the columns of the known ones, and metrics of ``evaluate``."""

from __future__ import annotations

import importlib
import os
import random
import re
import sys
from collections.abc import Mapping
from typing import Any, Callable, Optional

from ...torch_compat import replaces
from .absence import ABSENT, Labels, Note, on_this_machine, short_name
from .image_datasets import SIDE, picture

# Pictures and sounds that a script names one by one, as in a list of its repository, and that are not on the disk.

_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
_SOUNDS = (".wav", ".flac", ".ogg", ".mp3", ".m4a")
_OF_CLASSES = re.compile(r"mask|label|annot|segment|(?<![a-z])gt", re.IGNORECASE)
"""In the name of a picture with numbers of classes as pixels, or of the directory that it is in."""
CLASSES_OF_PIXELS = 2
"""Any model that classifies the pixels of pictures has these two."""
SECONDS = 4
"""Of a sound: what is cut to segments must be longer."""
_RATES = (("libritts", 24_000), ("librispeech", 16_000), ("vctk", 48_000), ("commonvoice", 48_000))
"""Part of a path and the sampling rate of those recordings, in Hz."""
USUAL_RATE = 22_050
"""Of LJSpeech, which most scripts for one voice name."""


def serve_pillow(image: Any, note: Note, directory: str) -> None:
    """Serve ``PIL.Image.open``."""

    @_served(image, "open", "fp", _PICTURES, note)
    def draw(path: str, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if not _is_of_classes(path):
            return picture(path)
        mask = image.new("L", (SIDE, SIDE), 0)
        mask.paste(CLASSES_OF_PIXELS - 1, (SIDE // 4, SIDE // 4, 3 * SIDE // 4, 3 * SIDE // 4))
        return mask


def serve_opencv(cv2: Any, note: Note, directory: str) -> None:
    """Serve ``cv2.imread``, which gives None for what is not there."""

    @_served(cv2, "imread", "filename", _PICTURES, note)
    def draw(path: str, flags: Any = 1, *arguments: Any, **options: Any) -> Any:
        numpy: Any = sys.modules["numpy"]  # OpenCV has imported it
        if _is_of_classes(path):
            pixels = numpy.zeros((SIDE, SIDE), numpy.uint8)
            pixels[SIDE // 4 : 3 * SIDE // 4, SIDE // 4 : 3 * SIDE // 4] = CLASSES_OF_PIXELS - 1
            return pixels if flags <= 0 else numpy.stack((pixels,) * 3, axis=-1)
        drawn = numpy.frombuffer(_noise(path, SIDE * SIDE * 3), numpy.uint8).reshape(SIDE, SIDE, 3).copy()
        return drawn[:, :, 0].copy() if flags == 0 else drawn


def serve_scipy(wavfile: Any, note: Note, directory: str) -> None:
    """Serve ``scipy.io.wavfile.read``."""

    @_served(wavfile, "read", "filename", _SOUNDS, note)
    def make(path: str, *arguments: Any, **options: Any) -> Any:
        return _rate(path), _samples(path)


def serve_soundfile(soundfile: Any, note: Note, directory: str) -> None:
    """Serve ``soundfile.read``."""

    @_served(soundfile, "read", "file", _SOUNDS, note)
    def make(path: str, frames: int = -1, start: int = 0, *arguments: Any, **options: Any) -> Any:
        taken = _samples(path)[start:] if frames < 0 else _samples(path)[start : start + frames]
        sound = taken / 32768.0
        sound = (sound[:, None] if options.get("always_2d") else sound).astype(options.get("dtype", "float64"))
        return sound, _rate(path)


def serve_librosa(audio: Any, note: Note, directory: str) -> None:
    """Serve ``librosa.load``."""

    @_served(audio, "load", "path", _SOUNDS, note)
    def make(path: str, *, sr: Any = USUAL_RATE, duration: Any = None, **options: Any) -> Any:
        rate = int(sr or _rate(path))
        sound = _samples(path, rate) / 32768.0
        return sound[: len(sound) if duration is None else int(duration * rate)].astype("float32"), rate


def serve_torchaudio(torchaudio: Any, note: Note, directory: str) -> None:
    """Serve ``torchaudio.load``."""

    @_served(torchaudio, "load", "uri", _SOUNDS, note)
    def make(path: str, *arguments: Any, **options: Any) -> Any:
        sound = sys.modules["torch"].from_numpy((_samples(path) / 32768.0).astype("float32"))
        return sound[None], _rate(path)


def _served(
    owner: Any, name: str, parameter: str, endings: tuple[str, ...], note: Note
) -> Callable[[Callable[..., Any]], None]:
    """Have a decoder give what the decorated function makes for the path of a file with one of these endings, where
    that is not there; ``parameter`` is what the decoder calls the file.
    """

    def replace(make: Callable[..., Any]) -> None:
        @replaces(name, owner)
        def decode_or_make(decode: Any, *arguments: Any, **options: Any) -> Any:
            path = _absent(arguments[0] if arguments else options.get(parameter), endings)
            if not path:
                return decode(*arguments, **options)
            kind = "pictures" if endings is _PICTURES else "noise"
            note(f"the {os.path.splitext(path)[1]} files that the script names (random {kind})")
            options.pop(parameter, None)
            return make(path, *arguments[1:], **options)

    return replace


def _absent(file: Any, endings: tuple[str, ...]) -> str:
    """Return the path of a file that is not there and has one of these endings; empty for anything else."""
    if not isinstance(file, (str, os.PathLike)):
        return ""
    path = os.fspath(file)
    # os.path.exists may be one that takes pretended names for files.
    return path if isinstance(path, str) and path.lower().endswith(endings) and not os.path.lexists(path) else ""


def _is_of_classes(path: str) -> bool:
    """Return whether a picture is a mask, by its name and those of its directories below the place of the data."""
    return not path.lower().endswith((".jpg", ".jpeg")) and bool(_OF_CLASSES.search(path))


def _rate(path: str) -> int:
    plain = re.sub(r"[\W_]", "", path.lower())
    return next((rate for word, rate in _RATES if word in plain), USUAL_RATE)


def _samples(path: str, rate: int = 0) -> Any:
    """Return noise of 16 bits that is the same for the same path."""
    numpy: Any = importlib.import_module("numpy")
    return numpy.frombuffer(_noise(path, 2 * SECONDS * (rate or _rate(path))), numpy.int16).copy() // 8


def _noise(path: str, count: int) -> bytes:
    return random.Random(path).randbytes(count)


ROWS = 1_000
"""Of a split; the largest global batch in use has fewer."""
_PAIR = {"sentence1": "text", "sentence2": "text", "label": 2, "idx": "number"}
_SENTENCE = {"sentence": "text", "label": 2, "idx": "number"}
_ORDER = {"instruction": "text", "input": "text", "output": "text", "text": "text"}
_TALK = {"messages": "talk", "conversations": "talk", "text": "text"}
KNOWN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mrpc rte wnli", _PAIR),
    ("stsb", {**_PAIR, "label": "score"}),
    ("sst2 cola", _SENTENCE),
    ("qqp", {"question1": "text", "question2": "text", "label": 2, "idx": "number"}),
    ("qnli", {"question": "text", "sentence": "text", "label": 2, "idx": "number"}),
    ("mnli", {"premise": "text", "hypothesis": "text", "label": 3, "idx": "number"}),
    ("snli", {"premise": "text", "hypothesis": "text", "label": 3}),
    ("imdb rotten_tomatoes", {"text": "text", "label": 2}),
    ("emotion", {"text": "text", "label": 6}),
    ("ag_news", {"text": "text", "label": 4}),
    ("yelp_review_full", {"text": "text", "label": 5}),
    ("yelp_polarity", {"label": 2, "text": "text"}),
    ("alpaca", _ORDER),
    ("dolly", {"instruction": "text", "context": "text", "response": "text", "category": "text"}),
    ("sql_create_context", {"question": "text", "context": "text", "answer": "text"}),
    ("gsm8k", {"question": "text", "answer": "text"}),
    ("smoltalk ultrachat sharegpt", _TALK),
    ("wikitext openwebtext bookcorpus", {"text": "text"}),
    ("wikipedia", {"id": "text", "url": "text", "title": "text", "text": "text"}),
    ("fineweb tinystories c4", {"text": "text"}),
    ("cifar10", {"img": "image", "label": 10}),
    ("mnist", {"image": "image", "label": 10}),
    ("beans", {"image": "image", "labels": 3}),
    ("food101", {"image": "image", "label": 101}),
    ("imagenet", {"image": "image", "label": 1000}),
)
"""Parts of the names of data sets, or of their configurations, and their columns: a number is that of its classes."""
_LANGUAGES = re.compile(r"([a-z]{2})[-_]([a-z]{2})")
"""The configuration of a data set of sentences in two languages (``de-en`` of wmt14 and opus_books)."""
_OF_FILES = {
    **_ORDER,
    **_TALK,
    **dict.fromkeys(("prompt", "completion", "response", "answer"), "text"),
    **dict.fromkeys(("chosen", "rejected"), "talk"),
}
"""Of files that are not there, where the script does not give their columns: the usual names of texts."""
_BUILDERS = frozenset({"json", "csv", "text", "parquet"})
_WORDS = ("the", "rank", "step", "model", "data", "loss", "graph", "light", "river", "stone", "sees", "gives", "new")


def serve_datasets(module: Any, note: Note, directory: str) -> None:
    """Serve ``datasets.load_dataset``."""

    @replaces("load_dataset", module)
    def load_dataset(load: Any, path: Any, name: Any = None, *arguments: Any, **options: Any) -> Any:
        features = options.get("features")
        columns = columns_of(str(path), str(name or "")) if features is None else {}
        if columns is None:
            return load(path, name, *arguments, **options)
        loaded = on_this_machine(load, path, name, *arguments, **options)
        if loaded is not ABSENT:
            return loaded
        files = options.get("data_files")
        called = files if isinstance(files, str) else path if name is None else f"{short_name(path)} {name}"
        note(f"the data set {short_name(called)} (generated rows)")
        return _answer(columns, features, options)


def columns_of(path: str, name: str) -> Optional[dict[str, Any]]:
    """Return the columns of a data set by its name and configuration; None for one that is not known."""
    if path in _BUILDERS:
        return {"text": "text"} if path == "text" else _OF_FILES
    languages = _LANGUAGES.fullmatch(name)
    if languages is not None:
        return {"id": "text", "translation": languages.groups()}
    words = f"{short_name(path)} {name}".lower().replace("-", "_")
    return next((columns for known, columns in KNOWN if any(name in words for name in known.split())), None)


def _answer(columns: Mapping[str, Any], features: Any, options: Mapping[str, Any]) -> Any:
    """Return what is requested: one split, several, or all in a dictionary."""
    datasets = sys.modules["datasets"]

    def one(split: str) -> Any:
        draw = random.Random(split)
        if features is not None:
            rows = {key: [_of_feature(key, kind, draw) for _ in range(ROWS)] for key, kind in features.items()}
            table = datasets.Dataset.from_dict(rows, features=features)
        else:
            kinds = {key: _feature(datasets, kind) for key, kind in columns.items()}
            rows = {key: [_cell(kind, draw, row) for row in range(ROWS)] for key, kind in columns.items()}
            table = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
        return table.to_iterable_dataset() if options.get("streaming") else table

    split = options.get("split")
    if isinstance(split, (list, tuple)):
        return [one(str(part)) for part in split]
    if split is not None:
        return one(str(split))
    files = options.get("data_files")
    names = list(files) if isinstance(files, Mapping) else ["train"] if files else ["train", "validation", "test"]
    holder = datasets.IterableDatasetDict if options.get("streaming") else datasets.DatasetDict
    return holder({name: one(name) for name in names})


def _feature(datasets: Any, kind: Any) -> Any:
    if isinstance(kind, int):
        return datasets.ClassLabel(names=[f"class {number}" for number in range(kind)])
    if isinstance(kind, tuple):
        return {language: datasets.Value("string") for language in kind}
    if kind == "image":
        return datasets.Image()
    if kind == "talk":
        return [{"role": datasets.Value("string"), "content": datasets.Value("string")}]
    return datasets.Value({"text": "string", "number": "int32", "score": "float32"}[kind])


def _cell(kind: Any, draw: random.Random, row: int) -> Any:
    if isinstance(kind, int):
        return draw.randrange(Labels.below(kind))
    if isinstance(kind, tuple):
        return {language: sentence(draw) for language in kind}
    if kind == "image":
        return __import__("PIL.Image").Image.frombytes("RGB", (32, 32), draw.randbytes(32 * 32 * 3))
    if kind == "talk":
        return [{"role": role, "content": sentence(draw)} for role in ("user", "assistant")]
    if kind == "text":
        return sentence(draw)
    return row if kind == "number" else draw.uniform(0, 5)


def _of_feature(key: str, kind: Any, draw: random.Random, row: int = 0) -> Any:
    """Return a value of a column that the script has described."""
    if isinstance(kind, Mapping):
        return {name: _of_feature(name, one, draw, row) for name, one in kind.items()}
    inner = kind[0] if isinstance(kind, list) else getattr(kind, "feature", None)
    if inner is not None:
        return [_of_feature(key, inner, draw, row) for row in range(2)]
    kind_of = str(getattr(kind, "dtype", "string"))
    if kind_of == "string":
        if key == "role":
            return ("user", "assistant")[row % 2]
        # A text whose name is none of these may have to be JSON.
        return sentence(draw) if key in _OF_FILES or key in ("content", "question", "answer") else ""
    names = getattr(kind, "num_classes", None)
    return draw.randrange(Labels.below(int(names))) if names else 0


def sentence(draw: random.Random) -> str:
    """Return some words, the same for the same draws."""
    return " ".join(draw.choices(_WORDS, k=draw.randint(8, 40)))


class Metric:
    """A metric that takes anything and always returns one half."""

    def __init__(self, name: str) -> None:
        self.name = name

    def add(self, *arguments: Any, **options: Any) -> None:
        """Take an example."""

    def add_batch(self, *arguments: Any, **options: Any) -> None:
        """Take a batch."""

    def compute(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """Return the values that metrics of classification have."""
        return dict.fromkeys((self.name, "accuracy", "f1", "precision", "recall"), 0.5)


def serve_evaluate(module: Any, note: Note, directory: str) -> None:
    """Serve ``evaluate.load``."""

    @replaces("load", module)
    def load_metric(load: Any, path: Any, *arguments: Any, **options: Any) -> Any:
        loaded = on_this_machine(load, path, *arguments, **options)
        if loaded is not ABSENT:
            return loaded
        note(f"the metric {short_name(path)} (always 0.5)")
        return Metric(short_name(path))
