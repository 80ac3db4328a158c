"""Pictures and sounds that a script names one by one, as in a list of its repository, and that are not on the disk.

Only their decoders serve them: what names a file, or looks whether it is there, finds none.
"""

from __future__ import annotations

import functools
import importlib
import os
import random
import re
import sys
from typing import Any

from .absence import Note
from .image_datasets import SIDE, picture

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
    opened = image.open

    @functools.wraps(opened)
    def open_or_draw(fp: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        path = _absent(fp, _PICTURES)
        if not path:
            return opened(fp, mode, *arguments, **options)
        _note_served(note, "pictures", path)
        if not _is_of_classes(path):
            return picture(path)
        mask = image.new("L", (SIDE, SIDE), 0)
        mask.paste(CLASSES_OF_PIXELS - 1, (SIDE // 4, SIDE // 4, 3 * SIDE // 4, 3 * SIDE // 4))
        return mask

    image.open = open_or_draw


def serve_opencv(cv2: Any, note: Note, directory: str) -> None:
    """Serve ``cv2.imread``, which gives None for what is not there."""
    read = cv2.imread

    @functools.wraps(read)
    def imread(filename: Any, flags: Any = 1, *arguments: Any, **options: Any) -> Any:
        path = _absent(filename, _PICTURES)
        if not path:
            return read(filename, flags, *arguments, **options)
        _note_served(note, "pictures", path)
        numpy: Any = sys.modules["numpy"]  # OpenCV has imported it
        if _is_of_classes(path):
            pixels = numpy.zeros((SIDE, SIDE), numpy.uint8)
            pixels[SIDE // 4 : 3 * SIDE // 4, SIDE // 4 : 3 * SIDE // 4] = CLASSES_OF_PIXELS - 1
            return pixels if flags <= 0 else numpy.stack((pixels,) * 3, axis=-1)
        drawn = numpy.frombuffer(_noise(path, SIDE * SIDE * 3), numpy.uint8).reshape(SIDE, SIDE, 3).copy()
        return drawn[:, :, 0].copy() if flags == 0 else drawn

    cv2.imread = imread


def serve_scipy(wavfile: Any, note: Note, directory: str) -> None:
    """Serve ``scipy.io.wavfile.read``."""
    read = wavfile.read

    @functools.wraps(read)
    def read_or_make(filename: Any, *arguments: Any, **options: Any) -> Any:
        path = _absent(filename, _SOUNDS)
        if not path:
            return read(filename, *arguments, **options)
        _note_served(note, "sounds", path)
        return _rate(path), _samples(path)

    wavfile.read = read_or_make


def serve_soundfile(soundfile: Any, note: Note, directory: str) -> None:
    """Serve ``soundfile.read``."""
    read = soundfile.read

    @functools.wraps(read)
    def read_or_make(file: Any, frames: int = -1, start: int = 0, *arguments: Any, **options: Any) -> Any:
        path = _absent(file, _SOUNDS)
        if not path:
            return read(file, frames, start, *arguments, **options)
        _note_served(note, "sounds", path)
        taken = _samples(path)[start:] if frames < 0 else _samples(path)[start : start + frames]
        sound = taken / 32768.0
        return (sound[:, None] if options.get("always_2d") else sound).astype(options.get("dtype", "float64")), _rate(
            path
        )

    soundfile.read = read_or_make


def serve_librosa(audio: Any, note: Note, directory: str) -> None:
    """Serve ``librosa.load``."""
    load = audio.load

    @functools.wraps(load)
    def load_or_make(path: Any, *, sr: Any = USUAL_RATE, duration: Any = None, **options: Any) -> Any:
        name = _absent(path, _SOUNDS)
        if not name:
            return load(path, sr=sr, duration=duration, **options)
        _note_served(note, "sounds", name)
        rate = int(sr or _rate(name))
        sound = _samples(name, rate) / 32768.0
        return sound[: len(sound) if duration is None else int(duration * rate)].astype("float32"), rate

    audio.load = load_or_make


def serve_torchaudio(torchaudio: Any, note: Note, directory: str) -> None:
    """Serve ``torchaudio.load``."""
    load = torchaudio.load

    @functools.wraps(load)
    def load_or_make(uri: Any, *arguments: Any, **options: Any) -> Any:
        path = _absent(uri, _SOUNDS)
        if not path:
            return load(uri, *arguments, **options)
        _note_served(note, "sounds", path)
        sound = sys.modules["torch"].from_numpy((_samples(path) / 32768.0).astype("float32"))
        return sound[None], _rate(path)

    torchaudio.load = load_or_make


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


def _note_served(note: Note, what: str, path: str) -> None:
    kind = "pictures" if what == "pictures" else "noise"
    note(f"the {os.path.splitext(path)[1]} files that the script names (random {kind})")


def _rate(path: str) -> int:
    plain = re.sub(r"[\W_]", "", path.lower())
    return next((rate for word, rate in _RATES if word in plain), USUAL_RATE)


def _samples(path: str, rate: int = 0) -> Any:
    """Return noise of 16 bits that is the same for the same path."""
    numpy: Any = importlib.import_module("numpy")
    return numpy.frombuffer(_noise(path, 2 * SECONDS * (rate or _rate(path))), numpy.int16).copy() // 8


def _noise(path: str, count: int) -> bytes:
    return random.Random(path).randbytes(count)
