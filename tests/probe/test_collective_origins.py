"""Who issued a collective, by the frames that led to it, in a rehearsal, a watched job and a dump alike."""

from __future__ import annotations

import pytest

from ddpdoctor.probe.user_code import origin_of

USER, DDP = ("/job/train.py", "train"), "/site/torch/nn/parallel/distributed.py"
CALL, JOIN = ("/site/torch/nn/modules/module.py", "_call_impl"), "/site/torch/distributed/algorithms/join.py"
C10D, UTILS = "/site/torch/distributed/distributed_c10d.py", "/site/torch/distributed/utils.py"
FSDP, FWD, BWD = "/site/torch/distributed/fsdp/", "fsdp-forward", "fsdp-backward"
GROUP, STATE = f"{FSDP}_fully_shard/_fsdp_param_group.py", f"{FSDP}_fully_shard/_fsdp_state.py"
FLAT = f"{FSDP}_runtime_utils.py"
AUTOGRAD = ("/site/torch/autograd/graph.py", "_engine_run_backward")


@pytest.mark.parametrize(
    ("frames", "origin"),
    [
        ([], "ddp-backward"),
        ([AUTOGRAD, USER], "ddp-backward"),
        ([(C10D, "all_reduce"), USER], "user"),
        ([(C10D, "all_reduce"), AUTOGRAD, USER], "user"),
        ([(C10D, "all_reduce"), CALL, (DDP, "_run_ddp_forward"), (DDP, "forward"), CALL, USER], "user"),
        ([(DDP, "_sync_module_buffers"), (DDP, "_pre_forward"), (DDP, "forward"), CALL, USER], "ddp-forward"),
        ([(DDP, "DistributedDataParallel._pre_forward"), (DDP, "DistributedDataParallel.forward")], "ddp-forward"),
        ([(UTILS, "_sync_module_states"), (DDP, "__init__"), USER], "ddp-construct"),
        ([(UTILS, "_sync"), (DDP, "_ddp_init_helper"), (DDP, "DistributedDataParallel.__init__")], "ddp-construct"),
        ([(C10D, "all_reduce"), (JOIN, "notify_join_context"), (DDP, "_pre_forward"), USER], "join"),
        ([(C10D, "all_reduce")], "user"),
        ([(C10D, "all_gather"), (GROUP, "unshard"), (GROUP, "pre_forward"), (STATE, "_pre_forward"), CALL, USER], FWD),
        ([(C10D, "all_gather"), (GROUP, "unshard"), (GROUP, "pre_backward"), (STATE, "_pre_backward"), AUTOGRAD], BWD),
        ([(C10D, "reduce_scatter"), (GROUP, "post_backward"), (GROUP, "backward"), AUTOGRAD, USER], BWD),
        ([(C10D, "all_gather"), (GROUP, "unshard"), (GROUP, "pre_forward"), CALL, AUTOGRAD, USER], FWD),
        ([(C10D, "all_gather"), (FLAT, "_unshard"), (FLAT, "_pre_forward_unshard"), CALL, USER], FWD),
        ([(C10D, "reduce_scatter"), (FLAT, "_reduce_grad"), (FLAT, "_post_backward_hook")], BWD),
        ([(C10D, "all_gather"), ("/site/torch/distributed/tensor/_api.py", "full_tensor"), USER], "user"),
    ],
)
def test_the_innermost_frame_that_is_not_plain_torch_says_who_it_was(
    frames: list[tuple[str, str]], origin: str
) -> None:
    assert origin_of(frames) == origin
