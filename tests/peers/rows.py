"""Which suites and examples of other libraries are run."""

from __future__ import annotations

import sys

from tests.peers.suites import INSIDE, Suite

_RANKS = 2
_PYTEST = ("-m", "pytest", "-q", "-p", "no:ddpdoctor", "-p", "no:cacheprovider", "-p", "outcomes", "-o", "addopts=")
_TUTORIAL = "distributed/ddp-tutorial-series"


def _ranks(*command: str) -> tuple[str, ...]:
    return ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_RANKS}", *command)


def _accelerate(script: str) -> Suite:
    return Suite(
        name=f"accelerate {script}",
        module="accelerate",
        command=_ranks(str(INSIDE / "functions.py"), f"accelerate.test_utils.scripts.{script}"),
        variables=(("ACCELERATE_USE_CPU", "true"), ("CUDA_VISIBLE_DEVICES", "")),
    )


def _example(
    name: str, script: str, *arguments: str, repository: str = "", module: str = "", **more: tuple[tuple[str, str], ...]
) -> Suite:
    """A script that is trained on the CPU: with ``on_the_cpu``, texts in it that name a GPU or NCCL are replaced."""
    return Suite(
        name=f"state of {name}",
        repository=repository,
        module=module,
        folders=(script.rpartition("/")[0],) if repository else (),
        command=_ranks(str(INSIDE / "final_state.py"), script, *arguments),
        replaced=tuple((script, before, after) for before, after in more.get("on_the_cpu", ())),
        repetitions=3,
    )


_TRAINER = (
    ("self.model = model.to(self.gpu_id)", "self.model = model"),
    (", device_ids=[self.gpu_id]", ""),
    (" = source.to(self.gpu_id)", " = source"),
)

SUITES = (
    Suite(name="torch forked", command=(str(INSIDE / "torch_forked.py"),), takes_names=True, most_s=600),
    Suite(name="torch torchrun", command=_ranks(str(INSIDE / "torch_ranks.py")), takes_names=True, most_s=400),
    _accelerate("test_script"),
    _accelerate("test_sync"),
    _accelerate("test_ops"),
    _accelerate("test_distributed_data_loop"),
    _accelerate("test_ddp_comm_hook"),
    Suite(
        name="ignite",
        repository="pytorch/ignite",
        paths=(".",),
        command=(
            *_PYTEST,
            "--dist=each",
            f"--tx={_RANKS}*popen//python={sys.executable}",
            "-mdistributed",
            "-kgloo and not nccl and not horovod",
            "tests/ignite/distributed",
            "tests/ignite/metrics/test_accuracy.py",
        ),
        variables=(("WORLD_SIZE", str(_RANKS)),),
    ),
    Suite(
        name="torchmetrics",
        repository="Lightning-AI/torchmetrics",
        paths=("src", "tests"),
        command=(*_PYTEST, "tests/unittests/bases/test_ddp.py", "tests/unittests/bases/test_aggregation.py"),
        variables=(("USE_PYTEST_POOL", "1"),),
    ),
    _example(
        "pytorch/examples multigpu_torchrun.py",
        f"{_TUTORIAL}/multigpu_torchrun.py",
        "8",
        "4",
        repository="pytorch/examples",
        on_the_cpu=(
            *_TRAINER,
            (" = targets.to(self.gpu_id)", " = targets"),
            ('torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))', "pass"),
            ('"nccl"', '"gloo"'),
        ),
    ),
    _example(
        "pytorch/examples ddp/example.py",
        "distributed/ddp/example.py",
        repository="pytorch/examples",
        on_the_cpu=(
            (".to(rank)", ""),
            (", device_ids=[rank]", ""),
            ("torch.accelerator.set_device_index(rank)", "pass"),
            ("torch.distributed.get_default_backend_for_device(acc)", '"gloo"'),
            ("if not verify_min_gpu_count(min_gpus=_min_gpu_count)", "if False"),
        ),
    ),
    _example(
        "FLFoxMail/pytorch-distributed 04multi_gpu_torchrun.py",
        "DDP/04multi_gpu_torchrun.py",
        "8",
        "4",
        "32",
        repository="FLFoxMail/pytorch-distributed",
        on_the_cpu=(*_TRAINER, (" = target.to(self.gpu_id)", " = target"), ("'nccl'", "'gloo'")),
    ),
    _example("Lightning's demo models", str(INSIDE / "lightning_demo.py"), module="lightning"),
)
