"""Data sets of a file for each picture are served with the pictures and targets that the real classes give."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.probe.rehearsal.pretend import image_datasets


class VisionDataset:
    """In the place of torchvision's, with its signature."""

    def __init__(self, root: Any, transforms: Any = None, transform: Any = None, target_transform: Any = None) -> None:
        self.root = root
        self.transforms = transforms
        if transform or target_transform:
            self.transforms = lambda image, target: (
                transform(image) if transform else image,
                target_transform(target) if target_transform else target,
            )

    def __getitem__(self, index: int) -> Any:
        return "a real picture", index

    def __len__(self) -> int:
        return 3


def _classes() -> Any:
    class Food101(VisionDataset):
        def __init__(self, root: Any, split: str = "train", transform: Any = None, download: bool = False) -> None:
            super().__init__(root, transform=transform)
            if not Path(root, "food-101").exists():
                raise RuntimeError("Dataset not found. You can use download=True to download it")

    class OxfordIIITPet(VisionDataset):
        def __init__(self, root: Any, split: str = "trainval", target_types: Any = "category") -> None:
            raise RuntimeError("Dataset not found. You can use download=True to download it")

    class VOCSegmentation(VisionDataset):
        def __init__(self, root: Any, year: str = "2012", image_set: str = "train", transforms: Any = None) -> None:
            raise RuntimeError("Dataset not found or corrupted. You can use download=True to download it")

    class VOCDetection(VOCSegmentation):
        pass

    class CocoDetection(VisionDataset):
        def __init__(self, root: Any, annFile: Any, transform: Any = None) -> None:  # noqa: N803 - its name there
            raise FileNotFoundError(annFile)

        def __getitem__(self, index: int) -> Any:
            return self._load_image(self.ids[index]), self.coco.marks_of(self.ids[index])  # type: ignore[attr-defined]

        def _load_image(self, id: int) -> Any:
            raise FileNotFoundError(id)

    classes = (Food101, OxfordIIITPet, VOCSegmentation, VOCDetection, CocoDetection)
    return SimpleNamespace(VisionDataset=VisionDataset, **{one.__name__: one for one in classes})


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def datasets(said: list[str], tmp_path: Path) -> Any:
    classes = _classes()
    image_datasets.serve_pictures(classes, said.append, str(tmp_path))
    return classes


def test_pictures_with_labels_are_served_by_split_and_transformed(datasets: Any, said: list[str]) -> None:
    training = datasets.Food101("/data/none", transform=lambda image: image.size)
    assert isinstance(training, datasets.Food101) and len(training) == 75_750 and len(training.classes) == 101
    size, label = training[9]
    assert size == (256, 256) and 0 <= label < 101 and label == training._labels[9] == training[9][1]
    assert len(datasets.Food101("/data/none", split="test")) == 25_250
    assert set(said) == {"Food101 of torchvision (random images)"}


def test_what_is_on_the_disk_is_torchvisions_own_affair(datasets: Any, said: list[str], tmp_path: Path) -> None:
    (tmp_path / "food-101").mkdir()
    (tmp_path / "food-101" / "apple.jpg").touch()
    real = datasets.Food101(tmp_path)
    assert (len(real), real[1]) == (3, ("a real picture", 1))
    assert said == []


@pytest.mark.parametrize(
    ("files", "kind", "served"),
    [
        (("picture.png", "makefile"), "os.path.isfile", True),
        (("docs/other.jpg", "train.sh"), "os.path.exists", True),
        (("results/model.pt",), "pathlib", True),
        (("results/model.pt", "food-101/"), "os.path.isdir", True),
        (("results/model.pt", "food-101/part"), "os.path.isdir", False),
        (("picture.png", "food-101/images"), "os.path.isfile", False),
        (("picture.png",), "nothing", False),
    ],
)
def test_a_directory_of_other_files_has_no_data_set(
    files: tuple[str, ...], kind: str, served: bool, said: list[str], tmp_path: Path
) -> None:
    questions: dict[str, Callable[[Any], bool]] = {
        "os.path.isfile": lambda root: os.path.isfile(os.path.join(root, "food-101", "images")),
        "os.path.exists": lambda root: os.path.exists(root) and os.path.exists(os.path.join(root, "food-101")),
        "os.path.isdir": lambda root: os.path.isdir(os.path.join(root, "food-101")),
        "pathlib": lambda root: Path(root, "food-101").is_dir(),
        "nothing": lambda root: True,
    }
    classes, downloads = _classes(), list[bool]()

    def construct(self: Any, root: Any, split: str = "train", transform: Any = None, download: bool = False) -> None:
        downloads.append(download)
        questions[kind](root)
        raise RuntimeError("Dataset not found or corrupted. You can use download=True to download it")

    classes.Food101.__init__ = construct
    image_datasets.serve_pictures(classes, said.append, str(tmp_path / "own"))
    for name in files:
        place = tmp_path / name
        (place if name.endswith("/") else place.parent).mkdir(exist_ok=True, parents=True)
        if not name.endswith("/"):
            place.touch()
    if served:
        assert len(classes.Food101(tmp_path, download=True)) == 75_750 and downloads == [False]
    else:
        with pytest.raises(RuntimeError, match="corrupted"):
            classes.Food101(tmp_path, download=True)


def test_targets_that_are_no_labels_are_not_made_up(datasets: Any, said: list[str]) -> None:
    assert len(datasets.OxfordIIITPet("/data/none")) == 3_680
    with pytest.raises(RuntimeError, match="not found"):
        datasets.OxfordIIITPet("/data/none", target_types="segmentation")


def test_a_mask_has_the_class_of_each_pixel_and_a_border(datasets: Any) -> None:
    _, mask = datasets.VOCSegmentation("/data/none")[5]
    colours = {colour for _, colour in mask.getcolors()}
    assert mask.mode == "P" and {0, 255} <= colours and max(colours - {255}) < 21


def test_boxes_are_said_as_vocs_files_say_them(datasets: Any) -> None:
    data = datasets.VOCDetection("/data/none", image_set="val", transforms=lambda image, target: (image.size, target))
    size, target = data[0]
    (thing,) = target["annotation"]["object"]
    assert len(data) == 5_823 and size == (256, 256)
    assert thing["name"] in image_datasets.VOC_CLASSES
    assert int(thing["bndbox"]["xmin"]) < int(thing["bndbox"]["xmax"]) < 256


def test_cocos_file_of_annotations_is_generated(
    datasets: Any, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class COCO:
        def createIndex(self) -> None:  # noqa: N802 - its name there
            self.imgs = {image["id"]: image for image in self.dataset["images"]}  # type: ignore[attr-defined]

        def marks_of(self, image: int) -> list[Any]:
            return [mark for mark in self.dataset["annotations"] if mark["image_id"] == image]  # type: ignore[attr-defined]

    library = ModuleType("pycocotools.coco")
    library.COCO = COCO  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pycocotools", ModuleType("pycocotools"))
    monkeypatch.setitem(sys.modules, "pycocotools.coco", library)
    data = datasets.CocoDetection("/data/train2017", "/data/annotations/instances_train2017.json")
    image, marks = data[3]
    assert image.size == (256, 256) and len(marks) == 2 and len(data.ids) == 1_000
    for mark in marks:
        left, top, width, height = mark["bbox"]
        assert 0 <= left < left + width <= 256 and 0 <= top < top + height <= 256 and 1 <= mark["category_id"] <= 90
    assert said == ["instances_train2017.json of COCO (random images with boxes)"]
