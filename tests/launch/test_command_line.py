"""What launch commands say: script, arguments, ranks, environment; and what is said of commands that cannot be used."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from ddpdoctor.errors import UsageError
from ddpdoctor.launch.command_line import looks_like_launch, read_launch_line
from ddpdoctor.launch.rehearsal_plan import ranks_to_start
from ddpdoctor.launch.request import Launch, LaunchLine, on_cpu

NO_ENVIRONMENT = {"PATH": "/nowhere"}


def read(*command: str, **environment: str) -> LaunchLine:
    words = command[0].split() if len(command) == 1 else command
    return read_launch_line(words, {**NO_ENVIRONMENT, **environment})


@pytest.mark.parametrize(
    ("command", "starter", "target", "arguments", "ranks"),
    [
        ("torchrun train.py", "torchrun", "train.py", "", 1),
        ("torchrun --nproc-per-node 8 train.py --lr 3 -- x", "torchrun", "train.py", "--lr 3 -- x", 8),
        ("torchrun --nproc_per_node=8 --nnodes=2 --node_rank 1 train.py", "torchrun", "train.py", "", 16),
        ("torchrun --nnodes=1:4 --nproc-per-node=gpu --rdzv-backend=c10d train.py", "torchrun", "train.py", "", None),
        ("torchrun --nproc-per 4 --standalone -t 3 -r3 -- train.py", "torchrun", "train.py", "", 4),
        ("torchrun --nproc-per-node auto -m pkg.train a", "torchrun", "pkg.train", "a", None),
        ("torchrun --rdzv_endpoint h:1 --master-port=1 --no-python python -O train.py", "torchrun", "train.py", "", 1),
        ("python -u train.py -m x", "python", "train.py", "-m x", None),
        ("python3.11 -W ignore -Xdev -um pkg.train -O", "python", "pkg.train", "-O", None),
        ("python -m torch.distributed.run --nproc-per-node=2 train.py", "torchrun", "train.py", "", 2),
        ("python -m torch.distributed.launch --use_env --nproc_per_node=2 a.py", "torchrun", "a.py", "", 2),
        ("python -m torch.distributed.launch --nproc_per_node=2 a.py", "torch.distributed.launch", "a.py", "", 2),
        ("accelerate launch train.py --x", "accelerate", "train.py", "--x", None),
        ("accelerate launch --multi_gpu --num-processes=6 -m pkg.train", "accelerate", "pkg.train", "", 6),
        ("accelerate launch --num_processes 6 --fsdp_version 2 -q train.py", "accelerate", "train.py", "", 6),
        ("accelerate-launch --cpu --num_processes 2 train.py", "accelerate", "train.py", "", 2),
        ("python -m accelerate.commands.launch --num_machines 2 --num_processes 4 a.py", "accelerate", "a.py", "", 4),
        ("fabric run train.py --accelerator=cuda --devices=2 --lr 3", "fabric", "train.py", "--lr 3", 2),
        ("fabric run model --num_nodes 2 --devices 0,1 train.py", "fabric", "train.py", "", 4),
        ("fabric run --devices auto train.py -- --devices 3", "fabric", "train.py", "--devices 3", None),
        ("A=1 nohup env -u B --unset=C D=2 torchrun train.py", "torchrun", "train.py", "", 1),
        ("./train.py --lr 1", "python", "./train.py", "--lr 1", None),
    ],
)
def test_a_launch_command_says_what_is_started_and_on_how_many_ranks(
    command: str, starter: str, target: str, arguments: str, ranks: int | None
) -> None:
    line = read(command)
    assert (line.launch.starter, line.target, line.arguments, line.launch.ranks) == (
        starter,
        target,
        tuple(arguments.split()),
        ranks,
    )
    assert line.launch.module == (target == "pkg.train")
    assert line.launch.has_launcher == (starter != "python")


def test_options_of_the_interpreter_are_kept_but_for_those_that_change_nothing() -> None:
    assert read("python -u -B -E -X dev -Wignore train.py").launch.python_options == ("-E", "-X", "dev", "-Wignore")
    assert read("python -Om pkg.train").launch.python_options == ("-O",)
    assert read("torchrun --no-python python -I train.py").launch.python_options == ("-I",)


def test_the_environment_of_the_command_is_kept_with_spaces_and_equals_signs() -> None:
    line = read("A=x y=z", "env", "-u", "HOME", "B=", "torchrun", "train.py")
    assert line.launch.environment == {"A": "x y=z", "B": ""}
    assert line.launch.without == ("HOME",)


def test_torchruns_options_come_from_the_environment_too() -> None:
    assert read("torchrun train.py", PET_NPROC_PER_NODE="4").launch.ranks == 4
    assert read("torchrun --nproc-per-node 2 train.py", PET_NPROC_PER_NODE="4").launch.ranks == 2
    assert read("PET_NNODES=3 torchrun train.py").launch.ranks == 3


def test_a_launcher_belongs_to_the_environment_that_it_lies_in(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "torchrun").write_text(f"#!{sys.executable}\n")
    (folder / "accelerate").write_text("#!/bin/sh\n'''exec' python\n")
    (folder / "python").symlink_to(sys.executable)
    for path in folder.iterdir():
        path.chmod(0o755) if not path.is_symlink() else None
    by_name = read("torchrun train.py", PATH=str(folder)).launch
    assert (by_name.program, by_name.must_use_program) == (sys.executable, False)
    by_path = read(f"{folder}/accelerate launch train.py").launch
    assert (by_path.program, by_path.must_use_program) == (str(folder / "python"), True)
    assert read(f"{folder}/python train.py").launch.program == str(folder / "python")
    assert read("python train.py").launch.program == ""


def test_a_fabric_finds_what_its_command_says_in_the_environment() -> None:
    launch = read("fabric run a.py --accelerator=cuda --precision 16-mixed --devices 8").launch
    told = {"LT_CLI_USED": "1", "LT_ACCELERATOR": "cuda", "LT_PRECISION": "16-mixed"}
    assert (dict(launch.environment), launch.ranks) == (told, 8)
    assert (on_cpu(told)["LT_ACCELERATOR"], on_cpu(told)["LT_PRECISION"]) == ("cpu", "32-true")
    assert read("fabric run a.py --devices auto").launch.environment == {"LT_CLI_USED": "1"}
    assert "LT_ACCELERATOR" not in on_cpu({"LT_CLI_USED": "1"})


def test_accelerates_configuration_file_completes_its_command_line(tmp_path: Path) -> None:
    home = tmp_path / "accelerate"
    home.mkdir()
    (home / "default_config.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 8 # all\n"
        "mixed_precision: 'bf16'\ngpu_ids: 0,1\nfsdp_config:\n  num_processes: 3\nuse_cpu: false\n"
    )
    named = tmp_path / "two.json"
    named.write_text(json.dumps({"distributed_type": "MULTI_CPU", "num_processes": 2, "use_cpu": True}))
    default = read("accelerate launch train.py", HF_HOME=str(tmp_path)).launch
    assert default.ranks == 8
    assert default.environment == {"ACCELERATE_MIXED_PRECISION": "bf16", "CUDA_VISIBLE_DEVICES": "0,1"}
    other = read(f"accelerate launch --config_file {named} train.py", HF_HOME=str(tmp_path)).launch
    assert (other.ranks, other.environment["ACCELERATE_USE_CPU"]) == (2, "true")
    more = read("accelerate launch --num_processes 3 --mixed_precision fp16 a.py", HF_HOME=str(tmp_path)).launch
    assert (more.ranks, more.environment["ACCELERATE_MIXED_PRECISION"]) == (3, "fp16")
    (home / "default_config.yaml").write_text("distributed_type: FSDP\nnum_processes: 8\n")
    with pytest.raises(UsageError, match="FSDP"):
        read("accelerate launch train.py", HF_HOME=str(tmp_path))


@pytest.mark.parametrize(
    ("command", "message", "hint"),
    [
        ("torchrun", "torchrun has no script", "torchrun ... train.py"),
        ("torchrun --nproc-per-node", "--nproc-per-node needs a value", ""),
        ("torchrun --nproc-per-node eight a.py", "--nproc-per-node eight is not a number of processes", ""),
        ("torchrun --nproc-per-node 0 a.py", "--nproc-per-node 0 is not a number of processes", ""),
        ("torchrun --nnodes a a.py", "--nnodes a is neither a number of nodes nor a range", ""),
        ("torchrun --nprocs-per-node 2 a.py", "torchrun has no option --nprocs-per-node", "--nproc-per-node"),
        ("torchrun --rdzv 1 a.py", "torchrun has no option --rdzv", "--rdzv-backend or --rdzv-conf"),
        ("torchrun --standalone=1 a.py", "--standalone takes no value", ""),
        ("torchrun --lr 3", "torchrun has no option --lr", "after the script"),
        ("torchrun --no-python torchrun a.py", "one launcher starts another", "inner"),
        ("torchrun --no-python ./run.sh", "run.sh does not exist", ""),
        ("python", "python has no script", "python train.py"),
        ("python -c pass", "python -c runs code", "script"),
        ("python -m", "python -m has no module name", ""),
        ("accelerate config", "accelerate config starts no job", "accelerate launch"),
        ("accelerate launch --num_processes x a.py", "--num-processes x is not a number", ""),
        ("accelerate launch --use_fsdp a.py", "with FSDP", "--static"),
        ("accelerate launch --use_deepspeed a.py", "with DeepSpeed", "--static"),
        ("accelerate launch --config_file nowhere.yaml a.py", "nowhere.yaml does not exist", ""),
        ("fabric consolidate x", "fabric consolidate starts no job", "fabric run train.py"),
        ("fabric run --devices 2", "fabric run has no script", "fabric run train.py"),
        ("fabric run a.py --devices", "--devices needs a value", ""),
        ("fabric run a.py --strategy fsdp", "with the strategy fsdp", "--static"),
        ("accelerate launch --wrold 3 a.py", "accelerate launch has no option --wrold", ""),
        ("srun -N 2 python train.py --lr 3", "srun is not started", "ddpdoctor check -- python train.py --lr 3"),
        ("mpirun -n 4 ./bin/x train.py a", "mpirun is not started", "ddpdoctor check train.py -- a"),
        ("deepspeed --num_gpus 2 train.py --x 1", "deepspeed is not started", "ddpdoctor check train.py -- --x 1"),
        ("uv run torchrun a.py", "uv starts the job in its own environment", "uv run ddpdoctor check -- torchrun a.py"),
        ("conda run -n x python a.py", "conda starts", "conda run -n x ddpdoctor check -- python a.py"),
        ("poetry run train", "poetry starts", "poetry run ddpdoctor check -- torchrun train.py"),
        ("numactl -l torchrun a.py", "numactl is not started", "ddpdoctor check -- torchrun a.py"),
        ("lunch train.py", "lunch is not a launcher known to ddpdoctor", "ddpdoctor check train.py"),
        ("bash -lc torchrun", "bash runs shell code", "launch command"),
        ("bash nowhere.sh", "nowhere.sh does not exist", ""),
        ("env -i torchrun a.py", "env -i is not supported", "-u NAME"),
        ("A=1 env", "there is no command after `--`", "ddpdoctor check"),
        ("train.ipynb", "train.ipynb is a notebook", "nbconvert"),
        ("/ a", "/ is a directory", "ddpdoctor check train.py"),
        ("/nowhere/torchrun a.py", "/nowhere/torchrun: no such program", ""),
        ("/nowhere/python a.py", "/nowhere/python: no such program", ""),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_with_what_to_write_instead(command: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as raised:
        read(command)
    assert message in raised.value.message
    assert hint in raised.value.hint


def test_a_shell_script_is_answered_with_the_launch_that_stands_in_it(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    launch = "torchrun --nproc-per-node 8 \\\n    train.py  --lr 3 \\\n  -v"
    script.write_text(f"#!/bin/bash\n# torchrun old.py\ncd x\n{launch}\n")
    for command in (f"bash {script}", str(script), f"torchrun --no-python {script}"):
        with pytest.raises(UsageError, match="is a shell script") as raised:
            read(command)
        assert ", line 4," in raised.value.hint
        assert "`ddpdoctor check -- torchrun --nproc-per-node 8 train.py --lr 3 -v`" in raised.value.hint


def test_the_launch_of_a_shell_script_is_shown_with_what_the_script_was_given(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    launch = 'python -m torch.distributed.launch --nproc_per_node=$1 train.py --out "$2" ${@:3} 2>&1 | tee -a $2/log'
    script.write_text(f"#!/usr/bin/env bash\nset -x\n{launch}\n")
    with pytest.raises(UsageError, match="is a shell script") as raised:
        read(f"{script} 2 ./runs --depth 48,32 --lr 3")
    shown = "python -m torch.distributed.launch --nproc_per_node=2 train.py --out ./runs --depth 48,32 --lr 3"
    assert f"`ddpdoctor check -- {shown}`" in raised.value.hint
    script.write_text('torchrun --nproc-per-node 2 train.py "$@" > log.txt\n')
    with pytest.raises(UsageError) as raised:
        read(f"bash {script} --lr 3")
    assert "`ddpdoctor check -- torchrun --nproc-per-node 2 train.py --lr 3`" in raised.value.hint


def test_a_program_whose_first_line_names_python_is_a_script(tmp_path: Path) -> None:
    program = tmp_path / "train"
    program.write_text("#!/usr/bin/env python3\n")
    assert read(f"{program} --x").target == str(program)


@pytest.mark.parametrize(("ranks", "nproc", "expected"), [(None, 3, 3), (8, 3, 3), (2, 4, 2), (1, 2, 2), (1, 4, 2)])
def test_ranks_are_capped_and_never_one(ranks: int | None, nproc: int, expected: int) -> None:
    assert ranks_to_start(Launch(ranks=ranks), nproc) == expected


def test_a_scripts_arguments_are_no_launch_command() -> None:
    assert looks_like_launch(("torchrun", "train.py"))
    assert looks_like_launch((f"bin{os.sep}accelerate", "launch", "train.py"))
    assert not looks_like_launch(("accelerate", "--lr", "3"))
    assert not looks_like_launch(())


@pytest.mark.parametrize(
    ("lines", "command"),
    [
        ("CONFIG=configs/a.json\npython train.py -c $CONFIG", "python train.py -c configs/a.json"),
        ("N=4\ntorchrun --nproc-per-node ${N} train.py", "torchrun --nproc-per-node 4 train.py"),
        ("export OMP_NUM_THREADS=2\ntorchrun a.py", "OMP_NUM_THREADS=2 torchrun a.py"),
        ("A='x y'\nB=$A/z  \npython a.py \"$A\" $B", 'python a.py "x y" x y/z'),
        ("N=$(nvidia-smi -L | wc -l)\ntorchrun --nproc-per-node=$N a.py", "torchrun --nproc-per-node=$N a.py"),
        ("torchrun a.py $LATER\nLATER=1", "torchrun a.py $LATER"),
        ("N=1\nN=2\ntorchrun --nproc-per-node=$N a.py $1 $NAME", "torchrun --nproc-per-node=2 a.py $1 $NAME"),
    ],
)
def test_the_launch_in_a_shell_script_has_the_values_of_its_variables(lines: str, command: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"#!/bin/sh\n{lines}\n")
    with pytest.raises(UsageError) as raised:
        read(f"sh {script}")
    assert f"`ddpdoctor check -- {command}`" in raised.value.hint


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("setup.py", "setup(entry_points={'console_scripts': ['my-gan = my_gan.cli:main']})"),
        ("pyproject.toml", '[project.scripts]\nmy-gan = "my_gan.cli:main"\n'),
        ("pyproject.toml", '[tool.poetry.scripts]\n"my-gan" = "my_gan.cli:main"\n'),
        ("setup.cfg", "[options.entry_points]\nconsole_scripts =\n    my-gan=my_gan.cli:main\n"),
    ],
)
def test_a_command_that_the_project_installs_is_answered_with_what_it_starts(
    file: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-gan").mkdir()
    (tmp_path / file).write_text(text)
    with pytest.raises(UsageError, match="a command that this project installs") as raised:
        read("my-gan --data $HOME")
    assert "`from my_gan.cli import main; main()`" in raised.value.hint
    assert "`ddpdoctor check -- python start.py --data '$HOME'`" in raised.value.hint
    with pytest.raises(UsageError, match="not a launcher known"):
        read("gan --data x")
