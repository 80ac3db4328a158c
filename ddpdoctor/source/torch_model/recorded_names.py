"""Names of the calls that are recorded for checks."""

from __future__ import annotations

import re

ENVIRONMENT = "os.environ"
SET_VARIABLE = "set environment variable"
"""Name of the event of an assignment to ``os.environ``; its arguments are the variable and its value."""
SET_PARAM_GROUP = "set a setting of a parameter group"
"""Name of the event of ``optimizer.param_groups[0]["lr"] = rate``; its arguments are the setting and its value."""
GROUP_SETTINGS = frozenset({"lr", "weight_decay", "momentum", "betas", "eps"})
"""Settings of the optimizers of torch that a step of theirs depends on."""
SET_DEFAULT = "set default of environment variable"
FILE_CALLS = frozenset(
    {"os.mkdir", "os.makedirs", "os.symlink", "os.remove", "os.unlink", "os.rmdir", "os.rename", "os.replace"}
    | {"shutil.rmtree"}
)
CONTENT_METHODS = frozenset(
    {"write_text", "write_bytes", "read_text", "read_bytes", "to_csv", "to_parquet"}
    | {"save_pretrained", "save", "savefig"}
)
RECORDED_BUILTINS = frozenset({"builtins.open", "builtins.print"})
"""Of Python's own functions those whose calls are recorded; of all other libraries every call is."""
FILE_METHODS = frozenset({"mkdir", "symlink_to", "unlink", "rmdir"})
READING_METHODS = frozenset({"item", "cpu", "tolist", "numpy"})
"""Methods of a tensor that wait for the GPU."""
READING_FUNCTIONS = frozenset({"builtins.float", "builtins.int"})
"""Functions that do so with a tensor."""
STATE_METHODS = frozenset({"state_dict", "load_state_dict"})
TRACKING_METHODS = frozenset({"add_scalar", "add_scalars", "log_metric", "log_metrics", "log", "info", "pprint"})
"""Methods of trackers, loggers and printers."""
LOGGER_METHODS = frozenset({"setLevel", "addHandler", "setFormatter"})
"""Methods that decide which of a process's log lines are shown."""
PRINT_REPLACED = "replace print"
"""Name of the event of ``builtins.print = something_else``."""
DATA_METHODS = frozenset({"shuffle", "train_test_split"})
"""Methods of the data sets of Hugging Face that draw random numbers."""
KEPT_METHODS = STATE_METHODS | FILE_METHODS | TRACKING_METHODS | CONTENT_METHODS | DATA_METHODS | LOGGER_METHODS
"""Methods whose calls are always recorded."""

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
"""Names of the methods whose calls are recorded as events of the kind ``training``."""
SEEDING = re.compile(r"seed|(?<!use_)determinis|reproduc|(set|fix|init|same)_(all_)?rand", re.IGNORECASE)
"""Names of functions that may fix random numbers."""
