"""Fine-tuning with Accelerate: the learning rate is to fall to zero over all steps of the training."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(steps=60, learning_rate=1e-3):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps)
    latents = DataLoader(TensorDataset(torch.randn(600, 8)), batch_size=4, shuffle=True)
    model, optimizer, latents, scheduler = accelerator.prepare(model, optimizer, latents, scheduler)
    done = 0
    while done < steps:
        for (latent,) in latents:
            noise = torch.randn_like(latent)
            loss = nn.functional.mse_loss(model(latent + noise), noise)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            done += 1
            if done == steps:
                break
    accelerator.print("learning rate at the end", scheduler.get_last_lr())


if __name__ == "__main__":
    main()
