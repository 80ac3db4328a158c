"""What ranks collect and nothing reads: what is reported or chosen by afterwards is a rank's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.source.marked import check_marks

RUN = """
def score(found):
    return sum(found.values())

def evaluate(model, loader):
    return {{number: model(x).sum().item() for number, (x,) in enumerate(loader)}}

def finish(model, loader):
    size, rank = dist.get_world_size(), dist.get_rank()
    found = evaluate(model, loader)
    loss = torch.tensor(float(sum(found.values())))
{body}

def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 4))
    loader = DataLoader(data, 8, sampler=DistributedSampler(data))
    model = DDP(nn.Linear(4, 4))
    for (x,) in loader:
        model(x).sum().backward()
    print(finish(model, loader))

main()
"""
IN_VAIN = {
    "a list": """
    losses = [torch.zeros_like(loss) for _ in range(size)]
    dist.all_gather(losses, loss)  # DDP315
    return loss.item()
""",
    "objects of rank 0": """
    parts = [None for _ in range(size)]
    dist.gather_object(found, parts if rank == 0 else None, dst=0)  # DDP315
    return score(found)
""",
    "what is put together and forgotten": """
    parts, whole = [None] * size, {}
    dist.all_gather_object(parts, found)  # DDP315
    for part in parts:
        whole.update(part)
    return score(found)
""",
    "one after another": """
    parts = [None] * size
    dist.all_gather_object(parts, found)  # DDP315
    merged = []
    for number, part in enumerate(found):
        merged.append(parts)
    best = score(found)
    return best
""",
    "another name": """
    losses = [torch.zeros_like(loss) for _ in range(size)]
    dist.all_gather(tensor_list=losses, tensor=loss)  # DDP315
    everything = losses
    return f"loss {loss.item()}"
""",
    "made of what goes on": """
    mean = loss / len(found)
    means = [torch.zeros_like(mean) for _ in range(size)]
    dist.all_gather(means, mean)  # DDP315
    return score(found) / len(found)
""",
    "twice by one name": """
    for stage in ("validation", "test"):
        parts = [None] * size
        dist.gather_object(found, parts if rank == 0 else None)  # DDP315
        print(stage, score(found))
    parts = [None] * size
    dist.gather_object(found, parts if rank == 0 else None)  # DDP315
    return score(found)
""",
    "gathered by rank 0": """
    losses = [torch.zeros_like(loss) for _ in range(size)] if rank == 0 else None
    dist.gather(loss, losses, dst=0)  # DDP315
    if rank == 0:
        print(loss)
    return 0
""",
}
READ = {
    "a mean": """
    losses = [torch.zeros_like(loss) for _ in range(size)]
    dist.all_gather(losses, loss)
    print(loss)
    return torch.stack(losses).mean()
""",
    "one of them": """
    losses = [torch.zeros_like(loss) for _ in range(size)]
    dist.all_gather(losses, loss)
    losses[rank] = loss
    return sum(losses)
""",
    "put together": """
    parts, whole = [None] * size, {}
    dist.all_gather_object(parts, found)
    for part in parts:
        whole.update(part)
    print(len(found))
    return score(whole)
""",
    "in a function of its own": """
    parts = [None] * size
    dist.all_gather_object(parts, found)
    def merged():
        return score(parts[0])
    return merged() + score(found)
""",
    "the parts of another tensor": """
    whole = torch.zeros(size)
    parts = list(whole.chunk(size))
    dist.all_gather(parts, loss.view(1))
    print(loss)
    return whole.mean()
""",
    "rows of another tensor": """
    whole = torch.zeros(size, 1)
    rows = [whole[number] for number in range(size)]
    dist.all_gather(rows, loss.view(1))
    print(loss)
    return whole.mean()
""",
    "tensors that others hold": """
    first, second = torch.zeros(1), torch.zeros(1)
    both = [first, second]
    dist.all_gather(both, loss.view(1))
    print(loss)
    return (first + second) / 2
""",
    "to meet": """
    parts = [None] * size
    dist.all_gather_object(parts, 1)
    return score(found)
""",
    "kept in the object": """
    finish.parts = [None] * size
    dist.all_gather_object(finish.parts, found)
    return score(found)
""",
    "for the caller": """
    def collect(parts):
        dist.all_gather_object(parts, found)
        return score(found)

    parts = [None] * size
    return collect(parts), score(parts[0])
""",
    "of all names": """
    parts = [None] * size
    dist.all_gather_object(parts, found)
    return score(found), locals()
""",
}


@pytest.mark.parametrize("way", IN_VAIN)
def test_what_is_collected_and_read_by_nothing_is_told(way: str, tmp_path: Path) -> None:
    check_marks(tmp_path, RUN.format(body=IN_VAIN[way]), "DDP315")


@pytest.mark.parametrize("way", READ)
def test_what_is_read_in_any_way_is_in_order(way: str, tmp_path: Path) -> None:
    check_marks(tmp_path, RUN.format(body=READ[way]), "DDP315")
