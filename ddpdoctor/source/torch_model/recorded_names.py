"""Names of the calls that are recorded for checks."""

from __future__ import annotations

import re

ENVIRONMENT = "os.environ"
SET_VARIABLE = "set environment variable"
"""Name of the event of an assignment to ``os.environ``; its arguments are the variable and its value."""
SET_DEFAULT = "set default of environment variable"
FILE_CALLS = frozenset(
    {"os.mkdir", "os.makedirs", "os.remove", "os.unlink", "os.rmdir", "os.rename", "os.replace", "shutil.rmtree"}
)
FILE_CONTENTS = frozenset(
    {
        "builtins.open",
        "torch.load",
        "numpy.save",
        "numpy.savez",
        "numpy.savetxt",
        "numpy.load",
        "numpy.loadtxt",
        "joblib.dump",
        "joblib.load",
        "safetensors.torch.save_file",
        "safetensors.torch.load_file",
        "shutil.copy",
        "shutil.copyfile",
        "shutil.move",
        "pandas.read_csv",
        "pandas.read_json",
        "pandas.read_parquet",
        "pandas.read_pickle",
    }
)
"""Full names of functions that read or write files."""
CONTENT_METHODS = frozenset(
    {"write_text", "write_bytes", "read_text", "read_bytes", "to_csv", "to_parquet", "save_pretrained"}
)
NOTED_CALLS = (
    FILE_CALLS
    | FILE_CONTENTS
    | {
        "builtins.print",
        "tqdm.tqdm",
        "tqdm.auto.tqdm",
        "tqdm.trange",
        "tqdm.auto.trange",
        "wandb.init",
        "wandb.log",
        "mlflow.start_run",
        "torch.cuda.init",
        "torch.cuda.synchronize",
        "torch.cuda.current_device",
        "torch.cuda.get_device_name",
        "torch.cuda.get_device_properties",
        "torch.cuda.mem_get_info",
        "torch.cuda.empty_cache",
    }
)
"""Full names of the functions whose calls are kept as events of the kind ``call``."""
FILE_METHODS = frozenset({"mkdir", "unlink", "rmdir"})
READING_METHODS = frozenset({"item", "cpu", "tolist", "numpy"})
"""Methods of a tensor that wait for the GPU."""
STATE_METHODS = frozenset({"state_dict", "load_state_dict"})
TRACKING_METHODS = frozenset({"add_scalar", "add_scalars", "log_metric", "log_metrics", "log", "info"})
"""Methods of trackers and loggers."""
KEPT_METHODS = STATE_METHODS | FILE_METHODS | TRACKING_METHODS | CONTENT_METHODS
"""Methods whose calls are always kept."""


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
