"""Names of the calls that the rank projection keeps for the checks of data and gradients."""

from __future__ import annotations

import re

TRAINING_CALLS = frozenset(
    {
        "torch.utils.data.random_split",
        "torch.randperm",
        "torch.autograd.grad",
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
        "apex.parallel.convert_syncbn_model",
        "sklearn.model_selection.train_test_split",
        "numpy.random.permutation",
        "numpy.random.shuffle",
        "numpy.random.choice",
        "numpy.random.RandomState",
        "numpy.random.default_rng",
        "random.shuffle",
        "random.sample",
        "urllib.request.urlretrieve",
        "wget.download",
        "gdown.download",
        "nltk.download",
        "shutil.unpack_archive",
    }
)
"""Full names of the functions whose calls are kept as events of the kind ``training``."""
TRAINING_METHODS = frozenset(
    {
        "parameters",
        "named_parameters",
        "children",
        "step",
        "zero_grad",
        "requires_grad_",
        "register_parameter",
        "add_module",
        "add_param_group",
        "manual_seed",
        "extractall",
        "no_sync",
    }
)
"""Names of the methods whose calls are kept as events of the kind ``training``."""
SEEDING = re.compile(r"seed|(?<!use_)determinis|reproduc|(set|fix|init|same)_(all_)?rand", re.IGNORECASE)
"""Names of functions that may fix random numbers."""
