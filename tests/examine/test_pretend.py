"""What a laptop lacks is pretended: data sets, pretrained weights and trackers; said at once, and off when asked."""

from __future__ import annotations

import json
import random
import textwrap
import urllib.response
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import tokenizers

from ddpdoctor.examination import RehearsalSection
from ddpdoctor.examine.another_try import another_try, rehearse_until_shown
from ddpdoctor.launch.request import RehearsalRequest
from ddpdoctor.probe.rehearsal.pretend import absence, image_datasets, language_models, other_packages, tables
from ddpdoctor.record.model import Job, Rank, RankException, RunRecord
from tests.check_command import check

# A library in the place of torchvision, with the classes and signatures that are patched there.
TORCHVISION = {
    "__init__.py": "",
    "datasets/__init__.py": """
        from .vision import VisionDataset
        from .folder import DatasetFolder, ImageFolder
        class CIFAR10(VisionDataset):
            def __init__(self, root, train=True, transform=None, target_transform=None, download=False):
                raise RuntimeError("Dataset not found or corrupted. You can use download=True to download it")
            def __getitem__(self, index):
                return self.data[index], self.targets[index]
            def __len__(self):
                return len(self.data)
    """,
    "datasets/vision.py": """
        class VisionDataset:
            def __init__(self, root, transforms=None, transform=None, target_transform=None):
                self.root, self.transform = root, transform
    """,
    "datasets/folder.py": """
        import os
        from .vision import VisionDataset
        class DatasetFolder(VisionDataset):
            def __init__(self, root, loader, transform=None):
                super().__init__(root, transform=transform)
                self.classes, self.class_to_idx = self.find_classes(root)
                self.samples, self.loader = self.make_dataset(root, self.class_to_idx), loader
            @staticmethod
            def make_dataset(directory, class_to_idx):
                return [(os.path.join(directory, name), 0) for name in os.listdir(directory)]
            def find_classes(self, directory):
                names = sorted(os.listdir(directory))
                return names, {name: number for number, name in enumerate(names)}
        class ImageFolder(DatasetFolder):
            pass
    """,
}
SCRIPT = """
import os
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets
import wandb
from mlflow.tracking import MlflowClient


class Client(MlflowClient):
    def say(self):
        return "said"


def main():
    dist.init_process_group("gloo")
    run = wandb.init(project="p", config={"lr": 0.1})
    with run.nested() as inner:
        inner.log({"a": 1})
    assert Client().say() == "said" and Client().log_metric("a", 1) is not None
    folder = datasets.ImageFolder("/data/imagenet/train", loader=open)
    assert len(folder.classes) == 1000 and len(folder.samples) == 10_000
    tokens = np.memmap("data/train.bin", dtype=np.uint16, mode="r")
    assert len(tokens) > 100_000 and int(tokens.max()) < 65
    data = datasets.CIFAR10("./data", train=True)
    assert isinstance(data, datasets.CIFAR10) and len(data) == 50_000 and data.classes
    image, label = data[7]
    assert image.shape == (32, 32, 3) and image.dtype == np.uint8 and 0 <= label < 10
    model = torch.nn.Linear(32 * 32 * 3, 10)
    before = model.weight.clone()
    state = torch.hub.load_state_dict_from_url("https://nowhere.invalid/weights-0123.pth")
    model.load_state_dict(state["model"])
    assert torch.equal(before, model.weight)
    assert torch.hub.list("someone/their-models:main") == []
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(data, batch_size=8, sampler=sampler):
            loss = torch.nn.functional.cross_entropy(model(images.float().flatten(1)), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


main()
"""


@pytest.fixture
def project(tmp_path: Path) -> tuple[Path, str]:
    """A directory with the script, and the path on which its torchvision lies."""
    library = tmp_path / "library" / "torchvision"
    for name, text in TORCHVISION.items():
        place = library / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(textwrap.dedent(text))
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    return folder, str(library.parent)


def examined(project: tuple[Path, str], *options: str) -> tuple[int, dict[str, Any]]:
    folder, library = project
    (folder / "start.py").write_text(f"import sys; sys.path.append({library!r})\n" + SCRIPT)
    return check("--time-limit", "240", *options, "start.py", cwd=folder, TORCH_HOME=str(folder / "none"))


def test_what_is_absent_is_pretended_and_said(project: tuple[Path, str]) -> None:
    _, report = examined(project)
    rehearsal = report["rehearsal"]
    assert (rehearsal["status"], rehearsal["steps"]) == ("completed", 8), rehearsal
    assert {note for note in rehearsal["notes"] if note.startswith("pretended: ")} == {
        "pretended: CIFAR10 of torchvision (random images)",
        "pretended: mlflow (a silent tracker)",
        "pretended: the images of imagenet/train (random ones)",
        "pretended: the models of someone/their-models on torch.hub (none)",
        "pretended: the weights weights-0123.pth (random ones)",
        "pretended: train.bin (an array of numbers)",
        "pretended: wandb (a silent tracker)",
    }


def test_nothing_is_pretended_when_it_is_switched_off(project: tuple[Path, str]) -> None:
    code, report = examined(project, "--no-pretend")
    assert (code, report["rehearsal"]["status"]) == (3, "failed")
    assert "pip install wandb" in report["rehearsal"]["hint"]
    assert not any(note.startswith("pretended") for note in report["rehearsal"]["notes"])


def test_what_is_there_is_never_replaced(tmp_path: Path) -> None:
    pictures = tmp_path / "train" / "cat"
    pictures.mkdir(parents=True)
    (pictures / "1.png").write_bytes(b"png")
    assert not image_datasets.is_absent(tmp_path / "train")
    assert image_datasets.is_absent(tmp_path / "val") and image_datasets.is_absent(tmp_path / "empty")


def test_timm_reads_generated_pictures_where_there_is_no_directory(tmp_path: Path) -> None:
    class Folder:
        def __init__(self, root: str) -> None:
            raise RuntimeError(f"Found 0 images in subfolders of {root}")

        def __getitem__(self, index: int) -> Any:
            raise NotImplementedError

    def create_reader(name: str, root: str, split: str) -> str:
        assert Path(root).exists()
        return f"the real one of {name}"

    said: list[str] = []
    readers = SimpleNamespace(ReaderImageFolder=Folder, create_reader=create_reader)
    image_datasets.serve_timm(readers, said.append, "")
    image_datasets.serve_timm_factory(readers, said.append, "")
    assert readers.create_reader("", str(tmp_path), "train") == "the real one of "
    with pytest.raises(AssertionError):
        readers.create_reader("tfds/imagenet", "/nowhere", "train")
    assert not said
    reader: Any = readers.create_reader("", "/nowhere/imagenet", "train")
    assert len(reader.class_to_idx) == 1000 and reader[3][0].read(2) == b"BM"
    assert said == ["the images of nowhere/imagenet (random ones)"]


def test_generated_data_are_the_same_on_every_rank() -> None:
    drawn = random.random()
    first = image_datasets.samples_of("/a/train", {"x": 0})
    assert first == image_datasets.samples_of("/a/train", {"x": 0}) and random.random() != drawn
    assert len(image_datasets.class_names("/data/ILSVRC2012/train")) == 1000
    assert len(image_datasets.class_names("/data/imagenette2-320/train")) == 10
    assert len(image_datasets.class_names("/data/flowers/train")) == image_datasets.FEWEST_CLASSES


def test_weights_that_stand_for_absent_ones_are_empty_at_any_depth() -> None:
    nothing = language_models.NoWeights()
    assert not nothing["state_dict"]["model"] and "head.weight" not in nothing["model"]


def test_a_silent_tracker_hands_decorated_functions_back() -> None:
    def train() -> str:
        return "trained"

    module = other_packages.SilentModule("wandb")
    assert module.watch(train)() == "trained" and not list(module.Api().runs())
    assert issubclass(type("Mine", (module.Callback,), {}), other_packages.Silent)


LANGUAGE = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

dist.init_process_group("gloo")
tokenizer = AutoTokenizer.from_pretrained("google-bert/bert-base-cased")
batch = tokenizer(["a text", "another"], ["its pair", "b"], padding=True, truncation=True, return_tensors="pt")
assert tokenizer.decode(batch["input_ids"][0], skip_special_tokens=True).startswith("a text")
assert batch["token_type_ids"].any() and tokenizer.pad_token_id is not None
assert sorted(AutoTokenizer.from_pretrained("nucleotides").get_vocab()) == sorted(["[PAD]", "[UNK]", *"ACGT"])
assert {"A", "C", "G", "T"} < set(AutoTokenizer.from_pretrained("./bert-of-dna").get_vocab())
model = AutoModelForSequenceClassification.from_pretrained("google-bert/bert-base-cased", num_labels=3)
assert AutoConfig.from_pretrained("someone/llama-70b").hidden_size == 256
assert model.config.num_labels == 3 and model.config.hidden_size == 768 and model.config.num_hidden_layers == 2
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(2):
    model(**batch, labels=torch.tensor([0, 2])).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_a_model_of_the_hub_is_a_small_one_of_its_kind(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LANGUAGE)
    words = ["[PAD]", "[UNK]", *"ACGT"]
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    (tmp_path / "nucleotides").mkdir()
    inner.save(str(tmp_path / "nucleotides" / "tokenizer.json"))
    (tmp_path / "nucleotides" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "pad_token": "[PAD]"})
    )
    (tmp_path / "bert-of-dna").mkdir()
    (tmp_path / "bert-of-dna" / "vocab.txt").write_text("\n".join([*words, "[CLS]", "[SEP]", "[MASK]"]))
    (tmp_path / "bert-of-dna" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    _, report = check("--time-limit", "240", "train.py", cwd=tmp_path, HF_HOME=str(tmp_path / "none"))
    rehearsal = report["rehearsal"]
    assert rehearsal["steps"] == 2, rehearsal
    assert {note for note in rehearsal["notes"] if note.startswith("pretended: ")} == {
        "pretended: the configuration of bert-base-cased (a small bert)",
        "pretended: the configuration of llama-70b (a small llama)",
        "pretended: the tokenizer of bert-base-cased (one token a byte)",
        "pretended: the weights of bert-base-cased (random ones)",
    }


def test_texts_of_the_web_are_generated_and_other_addresses_asked(tmp_path: Path) -> None:
    fsspec: Any = pytest.importorskip("fsspec")
    said: list[str] = []
    asked: list[str] = []
    answers = SimpleNamespace(urlopen=asked.append, addinfourl=urllib.response.addinfourl)
    language_models.serve_urllib(answers, said.append, str(tmp_path))
    answers.urlopen("https://nowhere.invalid/model.pt")
    assert asked == ["https://nowhere.invalid/model.pt"] and not said
    address = "https://nowhere.invalid/data/plays.txt"
    text = answers.urlopen(address).read()
    assert len(text) >= language_models.TEXT_BYTES and text.decode().count("\n") > 1_000

    files = SimpleNamespace(open=fsspec.open)
    language_models.serve_fsspec(files, said.append, str(tmp_path))
    assert files.open(address).open().read() == text
    assert set(said) == {"the text plays.txt of nowhere.invalid (generated words)"}


def test_texts_that_requests_gets_are_generated(tmp_path: Path) -> None:
    requests = pytest.importorskip("requests")
    address, said, asked = "https://nowhere.invalid/data/plays.txt", list[str](), list[str]()

    class Session:
        def request(self, method: str, url: str) -> None:
            asked.append(method)

    serving = SimpleNamespace(Session=Session, Response=requests.Response)
    language_models.serve_requests(serving, said.append, str(tmp_path))
    session: Any = Session()
    session.request("POST", address)
    answer = session.request("GET", address)
    answer.raise_for_status()
    assert asked == ["POST"] and len(answer.text) >= language_models.TEXT_BYTES
    assert said


class Diffuses:
    """In the place of a library's base class: a model that is not on the disk, or what only this test raises."""

    def __init__(self, block_out_channels: tuple[int, ...] = (64,), **others: Any) -> None:
        self.blocks = len(block_out_channels)

    @classmethod
    def from_pretrained(cls, name: str, **options: Any) -> Any:
        if name == "here":
            return "the real one"
        raise OSError(f"{name} does not appear to have a file named config.json.")


def test_models_of_diffusers_are_small_ones_that_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Diffuses, "from_pretrained", Diffuses.__dict__["from_pretrained"])
    said: list[str] = []
    language_models.serve_diffusers(
        "ModelMixin", "weights", "random ones", SimpleNamespace(ModelMixin=Diffuses), said.append, ""
    )
    encoder: Any = type("AutoencoderKL", (Diffuses,), {})
    other: Any = type("Other", (Diffuses,), {})
    assert encoder.from_pretrained("here") == "the real one" and not said
    assert encoder.from_pretrained("someone/vae", subfolder="vae").blocks == 4
    assert said == ["the weights of AutoencoderKL of vae (random ones)"]
    assert other.from_pretrained("someone/x").blocks == 1


@pytest.mark.parametrize(
    ("path", "name", "columns"),
    [
        ("nyu-mll/glue", "mrpc", {"sentence1", "sentence2", "label", "idx"}),
        ("imdb", "", {"text", "label"}),
        ("json", "", {"text", "messages", "prompt", "chosen", "rejected"}),
        ("opus_books", "en-it", {"id", "translation"}),
        ("someone/their-own", "", set()),
        ("someone/their-own", "plain-text", set()),
    ],
)
def test_tables_have_the_columns_of_the_known_ones(path: str, name: str, columns: set[str]) -> None:
    found = tables.columns_of(path, name)
    assert columns <= set(found or ()) and (found is None) == (not columns)


def test_sentences_in_two_languages_are_told_by_their_configuration() -> None:
    datasets = SimpleNamespace(Value=str)
    (languages,) = (kind for key, kind in (tables.columns_of("wmt14", "de-en") or {}).items() if key == "translation")
    assert tables._feature(datasets, languages) == {"de": "string", "en": "string"}
    assert set(tables._cell(languages, random.Random(0), 0)) == {"de", "en"}


def test_a_column_that_the_script_describes_is_filled_by_its_kind() -> None:
    text, labels = SimpleNamespace(dtype="string"), SimpleNamespace(dtype="int64", num_classes=3)
    talk = [{"role": text, "content": text, "tools": text}]
    rows = tables._of_feature("conversations", talk, random.Random(0))
    assert [row["role"] for row in rows] == ["user", "assistant"] and all(row["content"] for row in rows)
    assert {row["tools"] for row in rows} == {""} and tables._of_feature("label", labels, random.Random(0)) in range(3)


FINE_TUNING = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
try:
    torch.load("out/resume.pth")
except FileNotFoundError:
    print("from the beginning")
model.load_state_dict(torch.load("out/pretrained.pth", map_location="cpu")["model"], strict=False)
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.randn(8, 4)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_a_checkpoint_that_the_script_cannot_do_without_is_replaced_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FINE_TUNING)
    _, report = check("--time-limit", "240", "train.py", cwd=tmp_path)
    rehearsal = report["rehearsal"]
    assert (rehearsal["status"], rehearsal["steps"]) == ("completed", 2), rehearsal
    assert "pretended: the weights pretrained.pth (random ones)" in rehearsal["notes"]
    assert not any(note.startswith("pretended") and "resume.pth" in note for note in rehearsal["notes"])
    code, report = check("--time-limit", "240", "--no-pretend", "train.py", cwd=tmp_path)
    assert (code, report["rehearsal"]["steps"]) == (3, 0) and "lacks the data" in report["rehearsal"]["hint"]


@pytest.mark.parametrize(
    "asks", ["os.path.isfile(weights)", "os.path.exists(weights)", "Path(weights).is_file()", "Path(weights).exists()"]
)
def test_a_checkpoint_that_the_script_asks_for_first_is_replaced(asks: str, tmp_path: Path) -> None:
    looks = (
        f'import os\nfrom pathlib import Path\nweights = "out/pretrained.pth"\nif not {asks}:\n'
        '    raise RuntimeError("No such file {}".format(weights))\nmodel.load_state_dict('
    )
    (tmp_path / "train.py").write_text(FINE_TUNING.replace("model.load_state_dict(", looks))
    _, report = check("--time-limit", "240", "train.py", cwd=tmp_path)
    rehearsal = report["rehearsal"]
    assert (rehearsal["status"], rehearsal["steps"]) == ("completed", 2), rehearsal
    assert "pretended: the weights pretrained.pth (random ones)" in rehearsal["notes"]


def test_a_script_that_fails_for_weights_that_are_there_is_not_rehearsed_without_them(tmp_path: Path) -> None:
    language_models = tmp_path / "pretrained.pth"
    language_models.touch()
    record, section = _failing("RuntimeError", f"Error(s) in loading {language_models}: size mismatch", loads=False)
    again: Iterator[tuple[RunRecord, RehearsalSection]] = iter([(record, section)])
    assert rehearse_until_shown(RehearsalRequest(script=Path("t.py")), lambda request: next(again)).section is section
    language_models.unlink()
    again = iter([(record, section), _failing("", "", 4)])
    assert rehearse_until_shown(RehearsalRequest(script=Path("t.py")), lambda request: next(again)).section.steps == 4


@pytest.mark.parametrize(
    "reads",
    [
        'optimizer.load_state_dict(made["optimizer"])',
        'start = made["epoch"] + 1 if dist.get_rank() == 0 else 0',
        'options = made["args"].lr',
    ],
)
def test_a_script_that_reads_more_of_an_absent_checkpoint_than_weights_is_not_blamed(
    reads: str, tmp_path: Path
) -> None:
    loads = 'made = torch.load("out/last.pth", weights_only=False)\nmodel.module.load_state_dict(made["model"])\n'
    begin, loop = FINE_TUNING.split("for step", 1)
    begin = "\n".join(line for line in begin.splitlines() if "pretrained.pth" not in line)
    (tmp_path / "train.py").write_text(f"{begin}\n{loads}{reads}\nfor step{loop}")
    code, report = check("--time-limit", "240", "train.py", cwd=tmp_path)
    rehearsal = report["rehearsal"]
    assert (code, rehearsal["status"], rehearsal["steps"]) == (3, "failed", 0), report["findings"]
    assert "out/last.pth" in rehearsal["reason"] and "lacks the data" in rehearsal["hint"]
    (note,) = (note for note in rehearsal["notes"] if "last.pth" in note)
    why = "with a stand-in that leaves weights as they begin, which does not work for this script: rank"
    assert why in note and " raised " in note.partition(why)[2]


def _failing(kind: str, message: str, steps: int = 0, *, loads: bool = True) -> tuple[RunRecord, RehearsalSection]:
    """A rehearsal that ended in an exception after some steps; without a kind one that did not fail."""
    place = "lib/torch/serialization.py" if loads else "train.py"
    raised = RankException(time_ns=1, type=kind, message=message, traceback=f'File "/{place}"\n')
    ranks = (Rank(rank=0, end="raised", exceptions=(raised,)),) if kind else ()
    section = RehearsalSection(status="failed" if kind else "completed", reason=message, steps=steps)
    return RunRecord(job=Job(kind="rehearsal"), ranks=ranks), section


@pytest.mark.parametrize(
    ("runs", "counts"),
    [
        (["first.pth", ("KeyError", "'param_groups'", 0)], 0),
        (["first.pth", "second.pth", ("", "", 4)], 2),
        (["first.pth", "second.pth", ("TypeError", "'int' object is not iterable", 0)], 0),
        (["first.pth", ("TypeError", "'>' not supported between instances of 'float' and 'NoWeights'", 4)], 0),
        (["first.pth", ("ValueError", "of the script itself", 4)], 1),
    ],
)
def test_of_tries_without_weights_only_one_counts_that_came_further(runs: list[Any], counts: int) -> None:
    made = [
        _failing("FileNotFoundError", f"[Errno 2] No such file or directory: '{run}'")
        if isinstance(run, str)
        else _failing(*run)
        for run in runs
    ]
    again: Iterator[tuple[RunRecord, RehearsalSection]] = iter(made)
    shown = rehearse_until_shown(RehearsalRequest(script=Path("t.py")), lambda request: next(again))
    record, section = shown.record, shown.section
    assert next(again, None) is None and record is made[counts][0]
    assert msgspec.structs.replace(section, notes=()) == made[counts][1]
    kind, why = runs[-1][0], ", which does not work for this script: "
    assert section.notes[0].endswith(f"{why}rank 0 raised {kind}: {made[-1][1].reason}") == (counts == 0)


@pytest.mark.parametrize("message", ["Target 5 is out of bounds.", "Class values must be smaller than num_classes."])
def test_labels_beyond_the_models_classes_are_rehearsed_again_as_two(message: str, tmp_path: Path) -> None:
    raised = RankException(time_ns=1, type="IndexError", message=f"Process 0 failed:\n\n{message}")
    record = RunRecord(job=Job(kind="rehearsal"), ranks=(Rank(rank=0, end="raised", exceptions=(raised,)),))
    section, request = RehearsalSection(status="failed", reason=message), RehearsalRequest(script=tmp_path / "t.py")
    assert another_try(request, record, section) is None
    pretended = msgspec.structs.replace(record, job=msgspec.structs.replace(record.job, pretended=("the images",)))
    found = another_try(request, pretended, section)
    assert found is not None and found.request.few_labels and message.rstrip(".") in found.why
    assert another_try(found.request, pretended, section) is None


def test_few_labels_are_those_of_all_that_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name: number for number, name in enumerate(image_datasets.class_names("/data/pets"))}
    assert {label for _, label in image_datasets.samples_of("/data/pets", names)} == set(range(10))
    monkeypatch.setattr(absence.Labels, "are_few", True)
    assert {label for _, label in image_datasets.samples_of("/data/pets", names)} == {0, 1}
    draw = random.Random(0)
    assert {tables._cell(1000, draw, row) for row in range(40)} == {0, 1}
    assert {mark["category_id"] for mark in image_datasets.coco_annotations()["annotations"]} == {1, 2}
