"""Reads the command line of ``accelerate launch`` and the configuration file that completes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ddpdoctor.errors import UsageError
from ddpdoctor.launch.command.launcher_options import Parsed, Syntax, names, parse_options

NAME = "accelerate launch"
_SYNTAX = Syntax(
    name=NAME,
    valued=names(
        "--config-file --mixed-precision --num-processes --num-machines --num-cpu-threads-per-process --dynamo-backend"
        " --dynamo-mode --gpu-ids --machine-rank --main-process-ip --main-process-port --tee --log-dir --role"
        " --rdzv-backend --rdzv-conf --max-restarts --monitor-interval --main-training-function --vm --env --zero-stage"
        " --zero3-init-flag --zero3-save-16bit-model --gradient-accumulation-steps --gradient-clipping"
        " --mpirun-hostfile --mpirun-ccl --ipex-enabled"
    ),
    flags=names(
        "--help --quiet --cpu --multi-gpu --tpu --mps --use-xpu --ipex --enable-cpu-affinity --dynamo-use-fullgraph"
        " --dynamo-use-dynamic --dynamo-use-regional-compilation --use-deepspeed --use-fsdp --use-parallelism-config"
        " --use-megatron-lm --same-network --module --no-python --tpu-cluster --no-tpu-cluster --tpu-use-sudo"
        " --downcast-bf16 --fp8-use-autocast-during-eval --debug"
    ),
    families=(
        "--fsdp-", "--megatron-lm-", "--deepspeed-", "--offload-", "--fp8-", "--aws-", "--parallelism-config-"
    ),
    short={"-h": "--help", "-q": "--quiet", "-t": "--tee", "-m": "--module"},
)  # fmt: skip
_NOT_DDP = {
    "--use-fsdp": "FSDP",
    "--use-deepspeed": "DeepSpeed",
    "--use-megatron-lm": "Megatron-LM",
    "--tpu": "TPU",
    "--use-parallelism-config": "tensor or context parallelism",
}
_NOT_DDP_TYPES = {
    "FSDP": "FSDP",
    "DEEPSPEED": "DeepSpeed",
    "MEGATRON_LM": "Megatron-LM",
    "XLA": "TPU",
    "TPU": "TPU",
    "TP": "tensor parallelism",
}


class AcceleratedLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """What an ``accelerate launch`` starts."""

    parsed: Parsed
    ranks: int | None
    """Of the whole job; None when there are as many as devices."""
    nodes: int
    environment: Mapping[str, str]
    """What its processes read of it."""


def parse_accelerate(words: Sequence[str], environment: Mapping[str, str]) -> AcceleratedLaunch:
    """Take apart what follows ``accelerate launch``.

    Raises UsageError for a wrong command line, for a configuration file that cannot be read, and when the job is no
    DistributedDataParallel job.
    """
    parsed = parse_options(words, _SYNTAX)
    if "--module" in parsed.options and "--no-python" in parsed.options:
        raise UsageError(f"{NAME}: either --module or --no-python, not both")
    file = _configuration_file(parsed, environment)
    configuration = _configuration(file) if file is not None else {}
    kind = configuration.get("distributed_type", "").upper()
    other = next((name for option, name in _NOT_DDP.items() if option in parsed.options), "")
    explicit = {"--cpu", "--multi-gpu"} & parsed.options.keys()
    if other or (kind in _NOT_DDP_TYPES and not explicit):
        where = f" ({file})" if file is not None and not other else ""
        raise UsageError(
            f"{NAME} starts a job with {other or _NOT_DDP_TYPES[kind]}{where}: only DDP jobs are examined",
            "`--static` with the script alone still reads its source.",
        )
    ranks = parsed.count("--num-processes", NAME)
    if ranks is None and configuration.get("num_processes", "").isdigit():
        ranks = int(configuration["num_processes"]) or None
    nodes = parsed.count("--num-machines", NAME)
    if nodes is None and configuration.get("num_machines", "").isdigit():
        nodes = int(configuration["num_machines"]) or None
    precision = parsed.options.get("--mixed-precision", configuration.get("mixed_precision", "no")).lower()
    set_here = {"ACCELERATE_MIXED_PRECISION": precision}
    if "--cpu" in parsed.options or configuration.get("use_cpu", "").lower() == "true":
        set_here["ACCELERATE_USE_CPU"] = "true"
    if "--debug" in parsed.options or configuration.get("debug", "").lower() == "true":
        set_here["ACCELERATE_DEBUG_MODE"] = "true"
    gpus = parsed.options.get("--gpu-ids", configuration.get("gpu_ids", "all"))
    if gpus not in ("all", "null", ""):
        set_here["CUDA_VISIBLE_DEVICES"] = gpus
    return AcceleratedLaunch(parsed=parsed, ranks=ranks, nodes=nodes or 1, environment=set_here)


def _configuration_file(parsed: Parsed, environment: Mapping[str, str]) -> Path | None:
    """Return the file that counts: the one that is named, or the user's own if there is one."""
    named = parsed.options.get("--config-file")
    if named is not None:
        path = Path(named).expanduser()
        if not path.is_file():
            raise UsageError(f"{NAME}: --config_file {named} does not exist")
        return path
    if "--cpu" in parsed.options:
        return None
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    folder = Path(environment.get("HF_HOME") or cache).expanduser() / "accelerate"
    candidates = (folder / "default_config.yaml", folder / "default_config.json")
    return next((path for path in candidates if path.is_file()), None)


def _configuration(path: Path) -> dict[str, str]:
    """Return the scalars at the top level of a configuration, which is JSON or what ``accelerate config`` writes as
    YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{NAME}: {path} cannot be read: {error}") from error
    if path.suffix == ".json":
        try:
            read = json.loads(text)
        except ValueError as error:
            raise UsageError(f"{NAME}: {path} is not JSON: {error}") from error
        pairs = read.items() if isinstance(read, dict) else ()
        return {str(key): json.dumps(value).strip('"') for key, value in pairs if not isinstance(value, dict | list)}
    lines = (line.partition(" #")[0] for line in text.splitlines() if line[:1].isalpha())
    scalars = (line.partition(":") for line in lines if ":" in line)
    return {key.strip(): value.strip().strip("'\"") for key, _, value in scalars}
