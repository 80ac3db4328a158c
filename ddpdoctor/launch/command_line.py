"""Reads the command line by which a user launches a job: which script it starts, how, and on how many ranks."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ddpdoctor.errors import UsageError
from ddpdoctor.files import regex
from ddpdoctor.launch.launcher_options import (
    FrameworkLaunch,
    Parsed,
    Syntax,
    names,
    parse_fabric,
    parse_options,
    refuse,
    without_wrappers,
)
from ddpdoctor.launch.request import Launch, LaunchLine, Starter

# Reads the command lines of torch's own launchers: `torchrun` and the older `torch.distributed.launch`.

_VALUED = names(
    "--nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --max-restarts --monitor-interval"
    " --start-method --event-log-handler --role --log-dir --redirects --tee --local-ranks-filter --node-rank"
    " --duplicate-stdout-filters --duplicate-stderr-filters --log-line-prefix-template --master-addr --master-port"
    " --local-addr --logs-specs --numa-binding --signals-to-handle --shutdown-timeout"
)
_FLAGS = frozenset({"--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank", "--help"})
_SHORT = {"-m": "--module", "-r": "--redirects", "-t": "--tee", "-h": "--help"}
TORCHRUN = Syntax(name="torchrun", valued=_VALUED, flags=_FLAGS, short=_SHORT)
LAUNCH = Syntax(name="torch.distributed.launch", valued=_VALUED, flags=_FLAGS | {"--use-env"}, short=_SHORT)

AS_MANY_AS_DEVICES = frozenset({"auto", "gpu", "cpu", "xpu"})
_DEFAULTS = "PET_"
"""``PET_NPROC_PER_NODE`` in the environment is what ``--nproc-per-node`` is when it is not given."""


def parse_torch_launcher(words: Sequence[str], syntax: Syntax, environment: Mapping[str, str]) -> Parsed:
    """Take apart what follows the launcher's name; options come from the environment, too."""
    parsed = parse_options(words, syntax)
    for option in ("--nproc-per-node", "--nnodes"):
        value = environment.get(_DEFAULTS + option[2:].replace("-", "_").upper())
        if value is not None:
            parsed.options.setdefault(option, value)
    if "--module" in parsed.options and "--no-python" in parsed.options:
        raise UsageError(f"{syntax.name}: either --module or --no-python, not both")
    return parsed


def ranks_of_job(parsed: Parsed, name: str) -> int | None:
    """Ranks on all nodes together; None when they are as many as there are devices."""
    per_node = parsed.options.get("--nproc-per-node", "1")
    if per_node in AS_MANY_AS_DEVICES:
        return None
    count = parsed.count("--nproc-per-node", name) or 1
    return count * most_nodes(parsed, name)


def most_nodes(parsed: Parsed, name: str) -> int:
    """Return the upper end of ``--nnodes``, which is a number or a range."""
    text = parsed.options.get("--nnodes", "1")
    numbers = text.split(":")
    if len(numbers) > 2 or not all(number.isdigit() and int(number) for number in numbers):
        raise UsageError(f"{name}: --nnodes {text} is neither a number of nodes nor a range such as 1:4")
    return int(numbers[-1])


# Finds the Python that a program of a launch command belongs to.

_LONGEST_FIRST_LINE = 512


def named_by_path(word: str) -> bool:
    """Return whether the user wrote where a program is, and not only what it is called."""
    return os.sep in word


def program_of(word: str, environment: Mapping[str, str]) -> str:
    """Absolute path of a program; empty when only its name is given and no such program is on the PATH.

    Raises UsageError for a path at which there is no program.
    """
    found = shutil.which(word, path=environment.get("PATH", os.defpath))
    if found is None and named_by_path(word):
        raise UsageError(f"{word}: no such program")
    return os.path.abspath(found) if found is not None else ""


def python_of(word: str, environment: Mapping[str, str]) -> str:
    """Return the Python that runs a launcher: its first line names it, or it lies beside it; empty when it is not
    known.

    Raises UsageError for a path at which there is no program.
    """
    program = program_of(word, environment)
    if not program:
        return ""
    if os.path.basename(program).startswith("python"):
        return program
    interpreter = _interpreter_of(program)
    if interpreter:
        return interpreter
    beside = Path(program).with_name("python")
    return str(beside) if os.access(beside, os.X_OK) else ""


def is_python_script(word: str, environment: Mapping[str, str]) -> bool:
    """Return whether a file that is named by its path is run by Python: its first line says so."""
    path = Path(word)
    return named_by_path(word) and path.is_file() and "python" in _first_line(path)


def _interpreter_of(program: str) -> str:
    words = shlex.split(_first_line(Path(program)).removeprefix("#!"))
    if words and os.path.basename(words[0]).startswith("python") and os.access(words[0], os.X_OK):
        return words[0]
    return ""


def _first_line(path: Path) -> str:
    """Return the line that says which program runs a file; empty when it has none."""
    try:
        with path.open("rb") as file:
            line = file.readline(_LONGEST_FIRST_LINE)
    except OSError:
        return ""
    return line.decode("utf-8", "replace").strip() if line.startswith(b"#!") else ""


# Reads the command line of `accelerate launch` and the configuration file that completes it.

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


def parse_accelerate(words: Sequence[str], environment: Mapping[str, str]) -> FrameworkLaunch:
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
    return FrameworkLaunch(parsed=parsed, ranks=ranks, nodes=nodes or 1, environment=set_here)


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
    """Return the scalars at the top level of a configuration: JSON, or what ``accelerate config`` writes as YAML."""
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


_PYTHON = regex(r"python(w|\d+(\.\d+)?)?$")
_MODULE_OR_CODE = regex(r"-(?P<flags>[bBdEiIOPqsSuvx]*)(?P<what>[mc])(?P<value>.*)$", re.DOTALL)
"""``-m`` or ``-c``, maybe behind other letters and before its value in one word."""
_PYTHON_OPTION_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})
_LAUNCHER_MODULES: dict[str, Starter] = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launcher.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
    "lightning.fabric.cli": "fabric",
    "lightning_fabric.cli": "fabric",
}


def read_launch_line(words: Sequence[str], environment: Mapping[str, str]) -> LaunchLine:
    """Read a command as the shell would hand it over, environment assignments in front included.

    Raises UsageError, with what to write instead, for what is no such command or cannot be rehearsed.
    """
    wrapped = without_wrappers(words)
    around = {name: value for name, value in environment.items() if name not in wrapped.without}
    around |= wrapped.environment
    line = _read(wrapped.words, around)
    launch = msgspec.structs.replace(
        line.launch,
        environment={**wrapped.environment, **line.launch.environment},
        without=wrapped.without,
    )
    return msgspec.structs.replace(line, launch=launch)


def looks_like_launch(words: Sequence[str]) -> bool:
    """Return whether words that should be a script's arguments are a launch command."""
    head = Path(words[0]).name if words else ""
    return head == "torchrun" or (head, *words[1:2]) in (("accelerate", "launch"), ("fabric", "run"))


def _read(words: Sequence[str], environment: Mapping[str, str]) -> LaunchLine:
    head, rest = words[0], words[1:]
    name = Path(head).name
    if _PYTHON.match(name):
        return _python(head, rest, environment)
    if name == "torchrun":
        return _launched("torchrun", head, rest, environment)
    if name in ("accelerate", "accelerate-launch"):
        return _framework("accelerate", head, rest if name == "accelerate" else ["launch", *rest], environment)
    if name == "fabric":
        return _framework("fabric", head, rest, environment)
    if head.endswith(".py") or is_python_script(head, environment):
        return LaunchLine(target=head, arguments=tuple(rest), launch=Launch(starter="python"))
    raise refuse(words)


def _python(head: str, rest: Sequence[str], environment: Mapping[str, str]) -> LaunchLine:
    """``python [options] script`` or ``-m module``; the module may be a launcher."""
    options, left = [], list(rest)
    module = ""
    while left and left[0].startswith("-") and left[0] != "-":
        word = left.pop(0)
        if found := _MODULE_OR_CODE.match(word):
            if found["what"] == "c":
                raise UsageError(f"{head} -c runs code that is not in a file", "Write it to a script and pass that.")
            if not found["value"] and not left:
                raise UsageError(f"{head} -m has no module name")
            options += [f"-{found['flags']}"] if found["flags"] else []
            module = found["value"] or left.pop(0)
            break
        options.append(word)
        if word in _PYTHON_OPTION_WITH_VALUE and left:
            options.append(left.pop(0))
    if module in _LAUNCHER_MODULES:
        starter = _LAUNCHER_MODULES[module]
        if starter == "accelerate":
            through_cli = module.endswith("accelerate_cli")
            return _framework(starter, head, left if through_cli else ["launch", *left], environment)
        if starter == "fabric":
            return _framework(starter, head, left, environment)
        return _launched(starter, head, left, environment)
    if not module and (not left or left[0] == "-"):
        raise UsageError(f"{head} has no script", f"Write it as you launch it: `{head} train.py --its options`.")
    target = module or left.pop(0)
    launch = Launch(
        starter="python",
        module=bool(module),
        program=program_of(head, environment),
        must_use_program=named_by_path(head),
        python_options=tuple(option for option in options if option not in ("-u", "-B")),
    )
    return LaunchLine(target=target, arguments=tuple(left), launch=launch)


def _launched(starter: Starter, head: str, rest: Sequence[str], environment: Mapping[str, str]) -> LaunchLine:
    syntax = LAUNCH if starter == "torch.distributed.launch" else TORCHRUN
    parsed = parse_torch_launcher(rest, syntax, environment)
    if starter == "torch.distributed.launch" and "--use-env" in parsed.options:
        starter = "torchrun"
    ranks, nodes = ranks_of_job(parsed, syntax.name), most_nodes(parsed, syntax.name)
    return _of_launcher(starter, head, parsed, ranks, nodes, environment)


_EXAMPLES = {"accelerate": "accelerate launch ... train.py", "fabric": "fabric run train.py --devices 2"}


def _framework(starter: Starter, head: str, rest: Sequence[str], environment: Mapping[str, str]) -> LaunchLine:
    example = _EXAMPLES[starter]
    if list(rest[:1]) != example.split()[1:2]:
        raise UsageError(f"{shlex.join([head, *rest[:1]])} starts no job", f"`{example}` does.")
    found = parse_fabric(rest[1:]) if starter == "fabric" else parse_accelerate(rest[1:], environment)
    line = _of_launcher(starter, head, found.parsed, found.ranks, found.nodes, environment)
    return msgspec.structs.replace(line, launch=msgspec.structs.replace(line.launch, environment=found.environment))


def _of_launcher(
    starter: Starter, head: str, parsed: Parsed, ranks: int | None, nodes: int, environment: Mapping[str, str]
) -> LaunchLine:
    launch = Launch(
        starter=starter,
        module="--module" in parsed.options,
        ranks=ranks,
        nodes=nodes,
        program=python_of(head, environment),
        must_use_program=named_by_path(head),
    )
    if "--no-python" not in parsed.options:
        return LaunchLine(target=parsed.rest[0], arguments=parsed.rest[1:], launch=launch)
    inner = _read(parsed.rest, environment)
    if inner.launch.has_launcher:
        raise UsageError(f"one launcher starts another: {shlex.join(parsed.rest[:4])}", "Use the inner one only.")
    launch = msgspec.structs.replace(
        launch,
        module=inner.launch.module,
        program=inner.launch.program or launch.program,
        must_use_program=inner.launch.must_use_program or launch.must_use_program,
        python_options=inner.launch.python_options,
    )
    return LaunchLine(target=inner.target, arguments=inner.arguments, launch=launch)
