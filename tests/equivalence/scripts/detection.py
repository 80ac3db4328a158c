"""Pictures of different sizes with lists of boxes, and a loss per picture."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Pictures(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        size = 6 + index % 4
        picture = torch.randn(3, size, size, generator=generator)
        return picture, {"boxes": torch.rand(1 + index % 3, 4, generator=generator), "kind": index % 5}


def collate(pairs):
    return tuple(zip(*pairs))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Conv2d(3, 8, 3)
        self.boxes = nn.Linear(8, 4)
        self.kinds = nn.Linear(8, 5)

    def forward(self, pictures, targets):
        seen = torch.stack([self.backbone(picture[None]).relu().mean((2, 3))[0] for picture in pictures])
        kinds = torch.tensor([target["kind"] for target in targets])
        boxes = torch.stack([target["boxes"].mean(0) for target in targets])
        return {"kinds": F.cross_entropy(self.kinds(seen), kinds), "boxes": F.l1_loss(self.boxes(seen), boxes)}


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    data = Pictures()
    loader = DataLoader(data, batch_size=3, sampler=DistributedSampler(data), collate_fn=collate, num_workers=1)
    model = DDP(Detector())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for pictures, targets in loader:
        losses = model(pictures, targets)
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


main()
