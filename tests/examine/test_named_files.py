"""Pictures and sounds that a script names one by one are served by their decoders where they are not on the disk."""

from __future__ import annotations

import sys
import wave
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ddpdoctor.probe.rehearsal.pretend import tables


@pytest.fixture
def said() -> list[str]:
    return []


def missed(path: Any, *arguments: Any, **options: Any) -> Any:
    raise FileNotFoundError(path)


def decoder(name: str, serve: Any, said: list[str]) -> Any:
    library = SimpleNamespace(**{name: missed})
    serve(library, said.append, "")
    return getattr(library, name)


def test_pillow_draws_what_is_not_there_and_opens_what_is(said: list[str], tmp_path: Path) -> None:
    library = SimpleNamespace(open=Image.open, new=Image.new)
    tables.serve_pillow(library, said.append, "")
    Image.new("RGB", (3, 5)).save(tmp_path / "there.png")
    with library.open(tmp_path / "there.png") as there:
        assert there.size == (3, 5) and said == []
    drawn = library.open(tmp_path / "train" / "a.jpg")
    assert (drawn.mode, drawn.size) == ("RGB", (256, 256))
    assert drawn.tobytes() == library.open(str(tmp_path / "train" / "a.jpg")).tobytes()
    assert said[0] == "the .jpg files that the script names (random pictures)"
    with pytest.raises(FileNotFoundError):
        library.open(tmp_path / "notes.txt")
    with pytest.raises(FileNotFoundError):
        library.open(tmp_path / "nowhere")


@pytest.mark.parametrize("path", ["gtFine/train/a_labelIds.png", "SegmentationClass/a.png", "masks/7.png"])
def test_a_picture_of_classes_has_small_numbers(path: str, said: list[str], tmp_path: Path) -> None:
    library = SimpleNamespace(open=missed, new=Image.new)
    tables.serve_pillow(library, said.append, "")
    mask = library.open(tmp_path / path)
    assert mask.mode == "L" and {value for _, value in mask.getcolors()} == {0, 1}
    read = decoder("imread", tables.serve_opencv, said)
    assert read(str(tmp_path / path), 0).shape == (256, 256) and read(str(tmp_path / path), 0).max() == 1
    assert read(str(tmp_path / path)).shape == (256, 256, 3)


def test_opencv_gets_pictures_in_the_form_that_it_is_asked_for(said: list[str]) -> None:
    read = decoder("imread", tables.serve_opencv, said)
    assert read("/none/a.png").shape == (256, 256, 3) and read("/none/a.png", 0).shape == (256, 256)
    assert (read("/none/a.png") == read("/none/a.png")).all() and (read("/none/a.png") != read("/none/b.png")).any()
    with pytest.raises(FileNotFoundError):
        read("/none/a.txt")


@pytest.mark.parametrize(("path", "rate"), [("/none/LJSpeech-1.1/a.wav", 22_050), ("/none/LibriTTS/a.wav", 24_000)])
def test_sounds_have_the_rate_of_the_known_recordings(path: str, rate: int, said: list[str]) -> None:
    told, samples = decoder("read", tables.serve_scipy, said)(path)
    assert (told, samples.dtype, len(samples)) == (rate, np.int16, 4 * rate)
    sound, told = decoder("read", tables.serve_soundfile, said)(path, frames=100, dtype="float32", always_2d=True)
    assert (told, sound.dtype, sound.shape) == (rate, np.float32, (100, 1))
    assert set(said) == {"the .wav files that the script names (random noise)"}


def test_librosa_gets_the_rate_that_it_asks_for(said: list[str]) -> None:
    load = decoder("load", tables.serve_librosa, said)
    sound, rate = load("/none/a.flac", sr=16_000)
    assert (rate, len(sound), sound.dtype) == (16_000, 64_000, np.float32) and abs(sound).max() < 1
    assert load("/none/a.flac", sr=None, duration=1.0)[0].shape == (22_050,)


def test_torchaudio_gets_a_tensor(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(from_numpy=lambda array: array))
    sound, rate = decoder("load", tables.serve_torchaudio, said)("/none/VCTK-Corpus/a.wav")
    assert (rate, sound.shape) == (48_000, (1, 192_000))


def test_a_sound_on_the_disk_is_read(said: list[str], tmp_path: Path) -> None:
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, 8_000, 0, "NONE", ""))
        file.writeframes(b"\0\0")
    with pytest.raises(FileNotFoundError):
        decoder("read", tables.serve_scipy, said)(str(tmp_path / "a.wav"))
    assert said == []
