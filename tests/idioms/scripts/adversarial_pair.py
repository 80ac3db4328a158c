"""Two networks that train against each other, each under its own DDP, images of fixed noise saved by rank 0."""

import argparse
import os
import random

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Blobs(Dataset):
    def __len__(self):
        return 192

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        centre = torch.randint(2, 6, (2,), generator=generator).tolist()
        image = torch.full((1, 8, 8), -1.0)
        image[0, centre[0] - 1 : centre[0] + 1, centre[1] - 1 : centre[1] + 1] = 1.0
        return image


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif classname.find("Norm") != -1:
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self, nz, ngf):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False),
            nn.GroupNorm(2, ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self, ndf):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, 1, 4, 1, 0, bias=False),
        )

    def forward(self, x):
        return self.main(x).view(-1)


def set_requires_grad(net, flag):
    for parameter in net.parameters():
        parameter.requires_grad_(flag)


def main(opt):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    os.makedirs(opt.outf, exist_ok=True)
    manual_seed = opt.manualSeed + rank
    random.seed(manual_seed)
    torch.manual_seed(manual_seed)

    dataset = Blobs()
    sampler = DistributedSampler(dataset)
    dataloader = DataLoader(dataset, batch_size=opt.batchSize, sampler=sampler, drop_last=True)
    netG, netD = Generator(opt.nz, opt.ngf), Discriminator(opt.ndf)
    netG.apply(weights_init)
    netD.apply(weights_init)
    netG, netD = DDP(netG), DDP(netD, broadcast_buffers=False)
    criterion = nn.BCEWithLogitsLoss()
    fixed_noise = torch.randn(16, opt.nz, 1, 1)
    optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
    optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))

    for epoch in range(opt.niter):
        sampler.set_epoch(epoch)
        for i, real in enumerate(dataloader):
            # the discriminator: log(D(x)) + log(1 - D(G(z)))
            netD.zero_grad()
            noise = torch.randn(len(real), opt.nz, 1, 1)
            with torch.no_grad():
                fake = netG(noise)
            scores = netD(torch.cat([real, fake]))
            labels = torch.cat([torch.ones(len(real)), torch.zeros(len(fake))])
            errD = criterion(scores, labels)
            errD.backward()
            optimizerD.step()

            # the generator: log(D(G(z))), through the bare discriminator
            netG.zero_grad()
            fake = netG(noise)
            errG = criterion(netD.module(fake), torch.ones(len(fake)))
            errG.backward()
            optimizerG.step()
            if i % 5 == 0 and rank == 0:
                print(f"[{epoch}/{opt.niter}][{i}/{len(dataloader)}] D {errD.item():.4f} G {errG.item():.4f}")
        if rank == 0:
            with torch.no_grad():
                images = netG.module(fixed_noise)
            torch.save(images, f"{opt.outf}/fake_samples_epoch_{epoch:03d}.pt")
            torch.save(netG.module.state_dict(), f"{opt.outf}/netG_epoch_{epoch}.pth")
            torch.save(netD.module.state_dict(), f"{opt.outf}/netD_epoch_{epoch}.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batchSize", type=int, default=8)
    parser.add_argument("--nz", type=int, default=8)
    parser.add_argument("--ngf", type=int, default=8)
    parser.add_argument("--ndf", type=int, default=8)
    parser.add_argument("--niter", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.0002)
    parser.add_argument("--beta1", type=float, default=0.5)
    parser.add_argument("--manualSeed", type=int, default=7)
    parser.add_argument("--outf", default="samples")
    main(parser.parse_args())
