"""Names that ``from torch.utils.data import *`` and the like bring, as far as something is made of them here.

A file says nothing of what a star brings, and the libraries are not imported to be asked. A name that a release adds
and that is missing here is one that cannot be resolved, as all of them would be otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_DISTRIBUTED = """
    init_process_group destroy_process_group is_initialized is_available get_rank get_world_size new_group barrier
    monitored_barrier all_reduce all_gather all_gather_into_tensor all_gather_object all_to_all all_to_all_single
    broadcast broadcast_object_list gather gather_object reduce reduce_scatter reduce_scatter_tensor scatter
    scatter_object_list ReduceOp
"""
_MODULES = """
    Module Sequential ModuleList ModuleDict Parameter Linear Bilinear Identity Flatten Unflatten Embedding Dropout
    Dropout2d Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d BatchNorm1d BatchNorm2d BatchNorm3d
    SyncBatchNorm InstanceNorm1d InstanceNorm2d InstanceNorm3d GroupNorm LayerNorm ReLU LeakyReLU PReLU ELU GELU SiLU
    Tanh Sigmoid Softmax LogSoftmax MaxPool1d MaxPool2d MaxPool3d AvgPool1d AvgPool2d AvgPool3d AdaptiveAvgPool1d
    AdaptiveAvgPool2d AdaptiveMaxPool2d Upsample ZeroPad2d RNN LSTM GRU MultiheadAttention Transformer
    TransformerEncoder TransformerEncoderLayer CrossEntropyLoss NLLLoss MSELoss L1Loss SmoothL1Loss BCELoss
    BCEWithLogitsLoss DataParallel
"""
_DATA = """
    DataLoader Dataset IterableDataset TensorDataset Subset ConcatDataset ChainDataset StackDataset random_split Sampler
    SequentialSampler RandomSampler SubsetRandomSampler WeightedRandomSampler BatchSampler DistributedSampler
    get_worker_info
"""
_DATASETS = """
    MNIST FashionMNIST KMNIST EMNIST QMNIST USPS Omniglot CIFAR10 CIFAR100 SVHN STL10 ImageNet ImageFolder DatasetFolder
    FakeData CelebA Caltech101 Caltech256 Cityscapes CocoCaptions CocoDetection VOCDetection VOCSegmentation Flowers102
    Food101 OxfordIIITPet Places365 StanfordCars SBDataset LSUN LFWPairs LFWPeople UCF101 HMDB51 Kinetics
"""
_TRANSFORMS = """
    Compose ToTensor PILToTensor Normalize Resize CenterCrop RandomCrop RandomResizedCrop RandomHorizontalFlip
    RandomVerticalFlip RandomRotation RandomAffine RandomErasing RandomGrayscale RandomApply RandomChoice ColorJitter
    GaussianBlur AutoAugment RandAugment TrivialAugmentWide Pad Grayscale Lambda
"""
_OPTIMIZERS = "SGD Adam AdamW Adagrad Adadelta Adamax NAdam RAdam RMSprop Rprop ASGD LBFGS SparseAdam"
_SCHEDULERS = """
    LambdaLR StepLR MultiStepLR ConstantLR LinearLR ExponentialLR CosineAnnealingLR CosineAnnealingWarmRestarts
    CyclicLR OneCycleLR ReduceLROnPlateau SequentialLR PolynomialLR
"""
STARS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        module: frozenset(names.split())
        for module, names in (
            ("torch.distributed", _DISTRIBUTED),
            ("torch.nn", _MODULES),
            ("torch.nn.parallel", "DistributedDataParallel DataParallel"),
            ("torch.multiprocessing", "spawn Process Queue set_start_method"),
            ("torch.utils.data", _DATA),
            ("torch.utils.data.distributed", "DistributedSampler"),
            ("torch.optim", _OPTIMIZERS),
            ("torch.optim.lr_scheduler", _SCHEDULERS),
            ("torchvision.datasets", _DATASETS),
            ("monai.data", "DataLoader DistributedSampler"),
            ("torchvision.transforms", _TRANSFORMS),
        )
    }
)
"""By module the names that its star brings."""
