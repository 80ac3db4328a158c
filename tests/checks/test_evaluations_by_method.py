"""Evaluations that call another method of the model than its forward: it runs the model on a batch all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.source.marked import check_marks

RUN = """
from transformers import AutoModelForSeq2SeqLM

def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    data, other = TensorDataset(torch.randn(64, 4)), TensorDataset(torch.randn(64, 4))
    loader = DataLoader(data, 8, sampler=DistributedSampler(data))
    tests = DataLoader(other, 8{sampler})
    inner = AutoModelForSeq2SeqLM.from_pretrained("t5-small").cuda()
    model = DDP(inner, device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for (x,) in loader:
        model(x.cuda()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
{evaluation}

main()
"""
EVALUATED = {
    "the module": """
    with torch.no_grad():
        for (x,) in tests:  # DDP105
            print(rank, model.module.generate(x.cuda(), max_length=20))
""",
    "what was wrapped": """
    inner.eval()
    for (x,) in tests:  # DDP105
        with torch.no_grad():
            print(rank, inner.generate(input_ids=x.cuda()))
""",
    "a function": """
    @torch.no_grad()
    def evaluate(module):
        found = []
        for (x,) in tests:  # DDP105
            found.append(module.beam_search(x))
        return found

    print(rank, evaluate(model.module))
""",
    "in inference": """
    with torch.inference_mode():
        for number, (x,) in enumerate(tests):  # DDP105
            tokens = {"ids": x.cuda()}
            print(rank, model.module.predict(**tokens))
""",
}
SILENT = EVALUATED["the module"].replace("  # DDP105", "")
BY_ONE = "\n    if rank == 0:" + SILENT.replace("\n    ", "\n        ")
OF_NO_BATCH = SILENT.replace("generate(x.cuda(), max_length=20)", "num_parameters()")
IN_ORDER = {
    "a part": (SILENT, ", sampler=DistributedSampler(other, shuffle=False)"),
    "rank 0": (BY_ONE, ""),
    "no batch": (OF_NO_BATCH, ""),
}


@pytest.mark.parametrize("way", EVALUATED)
def test_a_method_of_the_model_evaluates_as_its_forward_does(way: str, tmp_path: Path) -> None:
    check_marks(tmp_path, RUN.format(sampler="", evaluation=EVALUATED[way]), "DDP105")


@pytest.mark.parametrize("way", IN_ORDER)
def test_parts_and_rank_0_and_what_runs_no_model_are_in_order(way: str, tmp_path: Path) -> None:
    evaluation, sampler = IN_ORDER[way]
    check_marks(tmp_path, RUN.format(sampler=sampler, evaluation=evaluation), "DDP105")
