"""Two generators and two critics in turns: linear decay, a pool of past images, one optimizer for each side."""

import argparse
import itertools
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

Tensor = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.FloatTensor


class Unpaired(Dataset):
    def __len__(self):
        return 240

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        a = torch.rand(3, 16, 16, generator=generator) * 2 - 1
        return {"A": a, "B": a.flip(-1).clamp(-0.5, 0.5)}


class Generator(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.InstanceNorm2d(width), nn.ReLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())

    def forward(self, x):
        return self.up(self.down(x))


class Critic(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(width, 1, 4))

    def forward(self, x):
        return self.net(x)


class ImagePool:
    def __init__(self, size=20):
        self.size, self.images = size, []

    def query(self, images):
        chosen = []
        for image in images.detach():
            if len(self.images) < self.size:
                self.images.append(image)
                chosen.append(image)
            elif random.random() > 0.5:
                place = random.randrange(self.size)
                chosen.append(self.images[place])
                self.images[place] = image
            else:
                chosen.append(image)
        return torch.stack(chosen)


def set_requires_grad(nets, wanted):
    for net in nets:
        for p in net.parameters():
            p.requires_grad_(wanted)


def parallel(net, gpu):
    return DistributedDataParallel(net.cuda(gpu), device_ids=[gpu], output_device=gpu)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--n_epochs", type=int, default=4)
    parser.add_argument("--decay_epoch", type=int, default=2)
    parser.add_argument("--checkpoints", default="checkpoints")
    opt = parser.parse_args()
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", device_id=torch.device(f"cuda:{gpu}"))
    rank = dist.get_rank()
    random.seed(rank)
    torch.cuda.manual_seed_all(1)
    torch.backends.cudnn.benchmark = True
    g_ab, g_ba, d_a, d_b = (parallel(net, gpu) for net in (Generator(), Generator(), Critic(), Critic()))
    adversarial, cycle = nn.MSELoss().cuda(), nn.L1Loss().cuda()
    opt_g = torch.optim.Adam(itertools.chain(g_ab.parameters(), g_ba.parameters()), lr=2e-4, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(itertools.chain(d_a.parameters(), d_b.parameters()), lr=2e-4, betas=(0.5, 0.999))
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda e: 1 - max(0, e - opt.decay_epoch) / (opt.n_epochs + 1))
        for o in (opt_g, opt_d)
    ]
    pools = ImagePool(), ImagePool()
    sampler = DistributedSampler(Unpaired(), shuffle=True)
    loader = DataLoader(Unpaired(), batch_size=4, sampler=sampler, num_workers=1, pin_memory=True)
    for epoch in range(opt.n_epochs):
        sampler.set_epoch(epoch)
        for i, batch in enumerate(loader):
            real_a, real_b = batch["A"].type(Tensor), batch["B"].type(Tensor)
            set_requires_grad([d_a, d_b], False)
            opt_g.zero_grad()
            fake_b, fake_a = g_ab(real_a), g_ba(real_b)
            judged_b, judged_a = d_b.module(fake_b), d_a.module(fake_a)
            valid = Tensor(judged_b.shape).fill_(1.0)
            loss_g = adversarial(judged_b, valid) + adversarial(judged_a, valid)
            loss_g = loss_g + 10 * (cycle(fake_b.flip(-1), real_a) + cycle(fake_a.flip(-1), real_b))
            loss_g.backward()
            opt_g.step()
            set_requires_grad([d_a, d_b], True)
            opt_d.zero_grad()
            for net, real, fake, pool in ((d_a, real_a, fake_a, pools[0]), (d_b, real_b, fake_b, pools[1])):
                both = net(torch.cat([real, pool.query(fake)]))
                good, bad = both.chunk(2)
                loss_d = (adversarial(good, torch.ones_like(good)) + adversarial(bad, torch.zeros_like(bad))) / 2
                loss_d.backward()
            opt_d.step()
        for schedule in schedules:
            schedule.step()
        logged = torch.stack([loss_g.detach(), loss_d.detach()])
        dist.all_reduce(logged, op=dist.ReduceOp.AVG)
        if rank == 0:
            os.makedirs(opt.checkpoints, exist_ok=True)
            for name, net in (("G_AB", g_ab), ("G_BA", g_ba)):
                torch.save(net.module.cpu().state_dict(), f"{opt.checkpoints}/{epoch}_{name}.pth")
                net.cuda(gpu)
            print(f"{epoch}: G {logged[0]:.3f} D {logged[1]:.3f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
