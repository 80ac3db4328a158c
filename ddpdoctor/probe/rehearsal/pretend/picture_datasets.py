"""Data sets of torchvision that hold a file for each picture: generated pictures with labels, masks or boxes.

A class without its files never gets to its end of ``__init__``; its instance gets what torchvision's base class makes,
and pictures and targets in the place of those that its own ``__getitem__`` reads.
"""

from __future__ import annotations

import functools
import importlib
import os
import random
from typing import Any, NamedTuple

from .absence import Note
from .image_datasets import SIDE, picture, serve_construction

_MADE = "_made_by_ddpdoctor"
"""Attribute of an instance that has no files: the ``Pictures`` that it is made of."""


class Pictures(NamedTuple):
    """What the data of a class of torchvision look like."""

    training: int
    """Samples."""
    test: int
    classes: int
    target: str = "label"
    """``label``, ``mask`` (the class of each pixel) or ``annotation`` (boxes, as in VOC's XML files)."""


PICTURES = {
    "Caltech101": Pictures(8_677, 8_677, 101),
    "Caltech256": Pictures(30_607, 30_607, 257),
    "Country211": Pictures(31_650, 21_100, 211),
    "DTD": Pictures(1_880, 1_880, 47),
    "EuroSAT": Pictures(27_000, 27_000, 10),
    "FGVCAircraft": Pictures(3_334, 3_333, 100),
    "Flowers102": Pictures(1_020, 6_149, 102),
    "Food101": Pictures(75_750, 25_250, 101),
    "GTSRB": Pictures(26_640, 12_630, 43),
    "Imagenette": Pictures(9_469, 3_925, 10),
    "OxfordIIITPet": Pictures(3_680, 3_669, 37),
    "PCAM": Pictures(262_144, 32_768, 2),
    "RenderedSST2": Pictures(6_920, 1_821, 2),
    "StanfordCars": Pictures(8_144, 8_041, 196),
    "SUN397": Pictures(108_754, 108_754, 397),
    "VOCSegmentation": Pictures(1_464, 1_449, 21, "mask"),
    "VOCDetection": Pictures(5_717, 5_823, 20, "annotation"),
}
VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog"),
    *("horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
COCO_IMAGES = 1_000
COCO_CATEGORIES = 90
"""The highest number of one; models are made for one more."""
_LABEL = "category"
"""What torchvision calls the target that is a label, where there are others."""
_TESTS = ("val", "test")
"""How the names of splits begin that are not trained on."""


def serve_pictures(datasets: Any, note: Note, directory: str) -> None:
    """Make these classes of ``torchvision.datasets`` work without their files."""
    for name, pictures in PICTURES.items():
        real = getattr(datasets, name, None)
        if isinstance(real, type):
            _serve(real, pictures, datasets.VisionDataset, note)
    coco = getattr(datasets, "CocoDetection", None)
    if isinstance(coco, type):
        _serve_coco(coco, datasets.VisionDataset, note)


def _serve(real: Any, pictures: Pictures, vision: Any, note: Note) -> None:
    get, length = real.__getitem__, real.__len__
    serve_construction(real, vision, note, lambda dataset, named: _fill(dataset, pictures, named), _wants_labels)

    # The functions of the class may be those of its base, which others have: only instances of ours are served.
    @functools.wraps(get)
    def __getitem__(self: Any, index: int) -> Any:
        if _MADE not in vars(self):
            return get(self, index)
        drawn = picture(f"{real.__name__} {index}"), _target(self, pictures, int(index))
        return drawn if self.transforms is None else self.transforms(*drawn)

    @functools.wraps(length)
    def __len__(self: Any) -> int:
        made = vars(self).get(_MADE)
        return length(self) if made is None else len(made)

    real.__getitem__, real.__len__ = __getitem__, __len__


def _wants_labels(named: dict[str, Any]) -> bool:
    """Return whether the target is the usual one: segmentations and boxes of these classes are not generated."""
    return named.get("target_types", named.get("target_type", _LABEL)) in (_LABEL, [_LABEL], (_LABEL,))


def _fill(dataset: Any, pictures: Pictures, named: dict[str, Any]) -> None:
    """Give an instance its labels, under the names that torchvision's classes have for them, and its classes."""
    split = str(named.get("split") or named.get("image_set") or "train")
    count = pictures.test if named.get("train") is False or split.startswith(_TESTS) else pictures.training
    labels = random.Random(count).choices(range(pictures.classes), k=count)
    setattr(dataset, _MADE, labels)
    dataset._labels = dataset.y = dataset.targets = labels
    if not isinstance(getattr(type(dataset), "classes", None), (list, tuple)):
        dataset.classes = [f"class {number}" for number in range(pictures.classes)]
    dataset.class_to_idx = {str(name): number for number, name in enumerate(dataset.classes)}


def _target(dataset: Any, pictures: Pictures, index: int) -> Any:
    label = vars(dataset)[_MADE][index]
    if pictures.target == "label":
        return label
    if pictures.target == "mask":
        return _mask(label)
    low, high = str(SIDE // 4), str(3 * SIDE // 4)
    thing = {
        "name": VOC_CLASSES[label],
        "pose": "Unspecified",
        "truncated": "0",
        "difficult": "0",
        "bndbox": {"xmin": low, "ymin": low, "xmax": high, "ymax": high},
    }
    size = {"width": str(SIDE), "height": str(SIDE), "depth": "3"}
    return {"annotation": {"filename": f"{index:06d}.jpg", "size": size, "segmented": "0", "object": [thing]}}


def _mask(label: int) -> Any:
    """Return a picture with a middle of one class, and a border that counts for none, as VOC draws it."""
    image: Any = importlib.import_module("PIL.Image")
    mask = image.new("P", (SIDE, SIDE), 0)
    mask.paste(255, (SIDE // 4 - 2, SIDE // 4 - 2, 3 * SIDE // 4 + 2, 3 * SIDE // 4 + 2))
    mask.paste(label, (SIDE // 4, SIDE // 4, 3 * SIDE // 4, 3 * SIDE // 4))
    return mask


def _serve_coco(real: Any, vision: Any, note: Note) -> None:
    """Give ``pycocotools``, which reads COCO's annotations from a file, generated ones where there is none."""
    construct, load = real.__init__, real._load_image

    @functools.wraps(construct)
    def __init__(self: Any, root: Any, annFile: Any, *arguments: Any, **options: Any) -> None:  # noqa: N803
        if os.path.exists(annFile):
            construct(self, root, annFile, *arguments, **options)
            return
        names = ("transform", "target_transform", "transforms")
        vision.__init__(self, root, **{**dict(zip(names, arguments)), **options})
        self.coco = importlib.import_module("pycocotools.coco").COCO()
        self.coco.dataset = coco_annotations()
        self.coco.createIndex()
        self.ids = sorted(self.coco.imgs)
        setattr(self, _MADE, self.ids)
        note(f"{os.path.basename(str(annFile))} of COCO (random images with boxes)")

    @functools.wraps(load)
    def _load_image(self: Any, id: int) -> Any:
        return load(self, id) if _MADE not in vars(self) else picture(f"COCO {id}")

    real.__init__, real._load_image = __init__, _load_image


def coco_annotations() -> dict[str, Any]:
    """Return images, each with two boxes, as COCO's files of instances and captions have them."""
    draw = random.Random(0)
    images, marks = [], []
    for number in range(1, COCO_IMAGES + 1):
        images.append({"id": number, "file_name": f"{number:012d}.jpg", "width": SIDE, "height": SIDE})
        for part in range(2):
            left, top = draw.randrange(SIDE // 2), draw.randrange(SIDE // 2)
            side = SIDE // 4 + draw.randrange(SIDE // 4)
            right, low = left + side, top + side
            marks.append(
                {
                    "id": 2 * number + part,
                    "image_id": number,
                    "category_id": draw.randrange(1, COCO_CATEGORIES + 1),
                    "bbox": [float(left), float(top), float(side), float(side)],
                    "area": float(side * side),
                    "iscrowd": 0,
                    "segmentation": [[left, top, right, top, right, low, left, low]],
                    "caption": "a stone in the river",
                }
            )
    names = [{"id": number, "name": f"class {number}"} for number in range(1, COCO_CATEGORIES + 1)]
    return {"info": {}, "images": images, "annotations": marks, "categories": names}
