"""Images where a data set of images is not on the disk: torchvision's own, and folders of one directory a class."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import random
import sys
from collections.abc import Callable
from stat import S_ISDIR
from typing import Any, NamedTuple

from ...torch_compat import replaces
from .absence import Labels, Note

SIDE = 256
"""Of a generated picture of a folder, in pixels: what is cropped to 224 must be larger."""
IMAGES_OF_A_CLASS = 10
"""ImageNet's classes have 10,000 pictures with it, more than the largest global batch in use."""


class Kind(NamedTuple):
    """What the data of a class of torchvision look like."""

    training: int
    """Samples."""
    test: int
    shape: tuple[int, ...]
    """Of one sample as the class keeps it."""
    classes: int
    labels: str = "targets"
    """Attribute of the labels."""
    tensors: bool = False
    """Data and labels are tensors; otherwise an array and a list, or two arrays."""


KINDS = {
    **dict.fromkeys(("MNIST", "FashionMNIST", "KMNIST"), Kind(60_000, 10_000, (28, 28), 10, tensors=True)),
    "EMNIST": Kind(112_800, 18_800, (28, 28), 47, tensors=True),
    "CIFAR10": Kind(50_000, 10_000, (32, 32, 3), 10),
    "CIFAR100": Kind(50_000, 10_000, (32, 32, 3), 100),
    "SVHN": Kind(73_257, 26_032, (3, 32, 32), 10, labels="labels"),
    "STL10": Kind(5_000, 8_000, (3, 96, 96), 10, labels="labels"),
    "USPS": Kind(7_291, 2_007, (16, 16), 10),
}
_CLASSES_OF_FOLDERS = (
    ("imagenette", 10),
    ("tiny-imagenet", 200),
    ("tiny_imagenet", 200),
    ("imagenet100", 100),
    ("imagenet-100", 100),
    ("imagenet", 1000),
    ("ilsvrc", 1000),
    ("in1k", 1000),
    ("cifar100", 100),
    ("cub", 200),
)
"""Part of a path, the longer names of smaller sets first."""
FEWEST_CLASSES = 10
"""Of a folder with a name that gives no number: labels below the number that a model is made for are always right."""


def serve_torchvision(datasets: Any, note: Note, directory: str) -> None:
    """Make the classes of ``torchvision.datasets`` work without their files."""
    vision = datasets.VisionDataset
    for name, kind in KINDS.items():
        real = getattr(datasets, name, None)
        if isinstance(real, type):
            serve_construction(real, vision, note, functools.partial(_fill, kind))
    _serve_folders(datasets, note)


def serve_construction(
    real: Any,
    vision: Any,
    note: Note,
    fill: Callable[[Any, dict[str, Any]], None],
    is_served: Callable[[dict[str, Any]], bool] = lambda named: True,
) -> None:
    """Make a class of torchvision work without its files: as its base class makes it, then ``fill``.

    ``fill`` and ``is_served`` get the arguments by their names, with defaults; what is not served goes to the class.
    """
    signature = inspect.signature(real.__init__)

    @replaces("__init__", real)
    def __init__(construct: Any, self: Any, *arguments: Any, **options: Any) -> None:
        try:
            given = signature.bind(self, *arguments, **options)
            given.apply_defaults()
        except TypeError:
            construct(self, *arguments, **options)  # Python words the error
            return
        named = {**given.arguments, **given.arguments.pop("kwargs", {})}
        root = os.path.expanduser(str(named.get("root") or ""))
        if not is_served(named):
            construct(self, *arguments, **options)
            return
        here = {**options, "download": False} if "download" in options else options
        if has_files(root) and _constructs(root, lambda: construct(self, *arguments, **here)):
            return
        transforms = {name: named.get(name) for name in ("transforms", "transform", "target_transform")}
        vision.__init__(self, root, **transforms)
        fill(self, named)
        note(f"{real.__name__} of torchvision (random images)")


def _constructs(root: str, construct: Callable[[], None]) -> bool:
    """Construct a data set from what is there; return False where nothing that it looks for below ``root`` is.

    The directory may be the project's own, with files of other kinds. A data set of which a part is there is
    torchvision's own affair, and so is its error.
    """
    stat, looked_for = os.stat, list[bool]()

    def watched(path: Any, *arguments: Any, **options: Any) -> Any:
        inside = os.path.relpath(os.fspath(path), root) if isinstance(path, (str, os.PathLike)) else "."
        if inside != "." and not str(inside).startswith(os.pardir):
            # An empty directory may be another rank's, which has just made it.
            looked_for.append(os.path.lexists(path) and (not S_ISDIR(os.lstat(path).st_mode) or has_files(path)))
        return stat(path, *arguments, **options)

    os.stat = watched
    try:
        construct()
    except Exception:
        if any(looked_for) or not looked_for:
            raise
        return False
    finally:
        os.stat = stat
    return True


def has_files(root: str) -> bool:
    """Return whether anything is where a data set would be; what is there is for torchvision to judge."""
    for _, _, files in os.walk(root):
        if any(not name.startswith(".") and not name.endswith((".py", ".pyc", ".md", ".txt")) for name in files):
            return True
    return False


def _fill(kind: Kind, dataset: Any, named: dict[str, Any]) -> None:
    """Give a data set the attributes that its own ``__getitem__`` and the scripts read."""
    numpy: Any = sys.modules["numpy"]  # torchvision has imported it
    training = bool(named.get("train", str(named.get("split", "train")).startswith(("train", "unlabeled"))))
    count = kind.training if training else kind.test
    draw = numpy.random.Generator(numpy.random.PCG64(count))
    data = numpy.frombuffer(draw.bytes(count * int(numpy.prod(kind.shape))), numpy.uint8).reshape(count, *kind.shape)
    labels = draw.integers(0, Labels.below(kind.classes), count)
    dataset.train, dataset.split = training, named.get("split", "train" if training else "test")
    names = getattr(type(dataset), "classes", None)
    if not isinstance(names, (list, tuple)) or not names:
        names = [f"class {number}" for number in range(kind.classes)]
        dataset.classes = names
    if not isinstance(getattr(type(dataset), "class_to_idx", None), property):
        dataset.class_to_idx = {name: number for number, name in enumerate(names)}
    if kind.tensors:
        torch: Any = sys.modules["torch"]
        dataset.data, dataset.targets = torch.from_numpy(data.copy()), torch.from_numpy(labels)
        return
    dataset.data = data
    setattr(dataset, kind.labels, labels if kind.labels == "labels" else labels.tolist())


def _serve_folders(datasets: Any, note: Note) -> None:
    """Serve ``ImageFolder``, and ``ImageNet`` that is one, of a directory that is not there."""
    folder = datasets.DatasetFolder

    @replaces("find_classes", folder)
    def find_classes(find: Any, self: Any, directory: Any) -> Any:
        if not is_absent(directory):
            return find(self, directory)
        note(f"the images of {_short(directory)} (random ones)")
        names = class_names(str(directory))
        return names, {name: number for number, name in enumerate(names)}

    @replaces("make_dataset", folder)
    def make_dataset(make: Any, directory: Any, class_to_idx: Any, *arguments: Any, **options: Any) -> Any:
        if not is_absent(directory):
            return make(directory, class_to_idx, *arguments, **options)
        return samples_of(str(directory), class_to_idx)

    @replaces("__init__", folder)
    def __init__(construct: Any, self: Any, root: Any, loader: Any, *arguments: Any, **options: Any) -> None:
        construct(self, root, functools.partial(_load, loader) if is_absent(root) else loader, *arguments, **options)

    image_net = getattr(datasets, "ImageNet", None)
    if image_net is not None:
        _serve_image_net(image_net, datasets.ImageFolder)


def _serve_image_net(image_net: Any, image_folder: Any) -> None:

    @replaces("__init__", image_net)
    def __init__(construct: Any, self: Any, root: Any, split: str = "train", **options: Any) -> None:
        place = os.path.join(os.path.expanduser(str(root)), "imagenet", split)
        if not is_absent(root):
            construct(self, root, split, **options)
            return
        self.root, self.split = root, split
        image_folder.__init__(self, place, **options)
        self.root, self.wnids, self.wnid_to_idx = root, self.classes, self.class_to_idx
        self.classes = [(name,) for name in self.wnids]


def serve_timm(module: Any, note: Note, directory: str) -> None:
    """Serve the reader of such folders that timm has."""
    reader = module.ReaderImageFolder

    @replaces("__init__", reader)
    def __init__(construct: Any, self: Any, root: Any, *arguments: Any, **options: Any) -> None:
        if not is_absent(root):
            construct(self, root, *arguments, **options)
            return
        names = class_names(str(root))
        self.root, self.class_to_idx = root, {name: number for number, name in enumerate(names)}
        self.samples = samples_of(str(root), self.class_to_idx)
        note(f"the images of {_short(root)} (random ones)")

    @replaces("__getitem__", reader)
    def __getitem__(get: Any, self: Any, index: int) -> Any:
        path, target = self.samples[index]
        if not is_absent(self.root):
            return get(self, index)
        import io

        file = io.BytesIO()
        picture(path).save(file, "BMP")
        file.seek(0)
        return file, target


def serve_timm_factory(module: Any, note: Note, directory: str) -> None:
    """Serve what chooses timm's reader, and wants the directory to be there before it makes the reader."""

    @replaces("create_reader", module)
    def create_reader(create: Any, name: str, root: Any = None, split: str = "train", **options: Any) -> Any:
        if "/" in name or not isinstance(root, (str, os.PathLike)) or os.path.exists(root):
            return create(name, root, split, **options)
        return module.ReaderImageFolder(root)


def is_absent(directory: Any) -> bool:
    """Return whether a directory is not there, or empty."""
    try:
        with os.scandir(directory) as entries:
            return not any(entries)
    except OSError:
        return True


def _short(directory: Any) -> str:
    return os.sep.join(str(directory).rstrip(os.sep).split(os.sep)[-2:])


def class_names(directory: str) -> list[str]:
    """Return as many class names as the path stands for, in ImageNet's form."""
    lower = directory.lower()
    count = next((number for word, number in _CLASSES_OF_FOLDERS if word in lower), FEWEST_CLASSES)
    return [f"n{number:08d}" for number in range(count)]


def samples_of(directory: str, class_to_idx: dict[str, int]) -> list[tuple[str, int]]:
    """Return paths of pictures that are not there, with their labels."""
    return [
        (os.path.join(directory, name, f"{name}_{number}.JPEG"), label % Labels.below(len(class_to_idx)))
        for name, label in class_to_idx.items()
        for number in range(IMAGES_OF_A_CLASS * (1 if len(class_to_idx) > 200 else 100))
    ]


def _load(loader: Callable[[str], Any], path: str) -> Any:
    return loader(path) if os.path.exists(path) else picture(path)


def picture(path: str) -> Any:
    """Return a picture in colours that is the same for the same path."""
    blocks = importlib.import_module("PIL.Image").frombytes("RGB", (16, 16), random.Random(path).randbytes(16 * 16 * 3))
    return blocks.resize((SIDE, SIDE))


# Data sets of torchvision that hold a file for each picture: generated pictures with labels, masks or boxes.

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
    serve_construction(real, vision, note, lambda dataset, named: _label(dataset, pictures, named), _wants_labels)

    # The functions of the class may be those of its base, which others have: only instances of ours are served.
    @replaces("__getitem__", real)
    def __getitem__(get: Any, self: Any, index: int) -> Any:
        if _MADE not in vars(self):
            return get(self, index)
        drawn = picture(f"{real.__name__} {index}"), _target(self, pictures, int(index))
        return drawn if self.transforms is None else self.transforms(*drawn)

    @replaces("__len__", real)
    def __len__(length: Any, self: Any) -> int:
        made = vars(self).get(_MADE)
        return length(self) if made is None else len(made)


def _wants_labels(named: dict[str, Any]) -> bool:
    """Return whether the target is the usual one: segmentations and boxes of these classes are not generated."""
    return named.get("target_types", named.get("target_type", _LABEL)) in (_LABEL, [_LABEL], (_LABEL,))


def _label(dataset: Any, pictures: Pictures, named: dict[str, Any]) -> None:
    """Give an instance its labels, under the names that torchvision's classes have for them, and its classes."""
    split = str(named.get("split") or named.get("image_set") or "train")
    count = pictures.test if named.get("train") is False or split.startswith(_TESTS) else pictures.training
    labels = random.Random(count).choices(range(Labels.below(pictures.classes)), k=count)
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

    @replaces("__init__", real)
    def __init__(construct: Any, self: Any, root: Any, annFile: Any, *arguments: Any, **options: Any) -> None:  # noqa: N803
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

    @replaces("_load_image", real)
    def _load_image(load: Any, self: Any, id: int) -> Any:
        return load(self, id) if _MADE not in vars(self) else picture(f"COCO {id}")


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
                    "category_id": draw.randrange(Labels.below(COCO_CATEGORIES)) + 1,
                    "bbox": [float(left), float(top), float(side), float(side)],
                    "area": float(side * side),
                    "iscrowd": 0,
                    "segmentation": [[left, top, right, top, right, low, left, low]],
                    "caption": "a stone in the river",
                }
            )
    names = [{"id": number, "name": f"class {number}"} for number in range(1, COCO_CATEGORIES + 1)]
    return {"info": {}, "images": images, "annotations": marks, "categories": names}
