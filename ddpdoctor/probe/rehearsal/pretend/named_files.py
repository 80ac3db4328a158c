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
from typing import Any, Callable

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
    decode = getattr(owner, name)

    def replace(make: Callable[..., Any]) -> None:
        @functools.wraps(decode)
        def decode_or_make(*arguments: Any, **options: Any) -> Any:
            path = _absent(arguments[0] if arguments else options.get(parameter), endings)
            if not path:
                return decode(*arguments, **options)
            kind = "pictures" if endings is _PICTURES else "noise"
            note(f"the {os.path.splitext(path)[1]} files that the script names (random {kind})")
            options.pop(parameter, None)
            return make(path, *arguments[1:], **options)

        setattr(owner, name, decode_or_make)

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
