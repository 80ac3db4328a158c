"""Reinforcement learning: every rank plays its own environments, policies are averaged by DDP, returns are shared."""

import argparse
import os
import random
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions.categorical import Categorical
from torch.nn.parallel import DistributedDataParallel


class Corridor:
    """A vectorised walk: reach the end of the corridor by stepping right."""

    def __init__(self, count, seed, device):
        self.count, self.device = count, device
        self.generator = torch.Generator().manual_seed(seed)
        self.place = torch.zeros(count, dtype=torch.long)

    def observe(self):
        noise = 0.05 * torch.randn(self.count, 6, generator=self.generator)
        return (nn.functional.one_hot(self.place, 6) + noise).to(self.device)

    def step(self, action):
        self.place = (self.place + action.cpu() * 2 - 1).clamp(0, 5)
        done = self.place == 5
        reward = done.float() - 0.01
        self.place[done] = 0
        return self.observe(), reward.to(self.device), done.float().to(self.device)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, x, action=None):
        hidden = self.network(x)
        probs = Categorical(logits=self.actor(hidden))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden).flatten()


def advantages(rewards, values, dones, last, gamma=0.99, lam=0.95):
    result, running = torch.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        following = last if t == len(rewards) - 1 else values[t + 1]
        delta = rewards[t] + gamma * following * (1 - dones[t]) - values[t]
        running = delta + gamma * lam * (1 - dones[t]) * running
        result[t] = running
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cuda", type=lambda x: x.lower() == "true", default=True)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=16)
    parser.add_argument("--updates", type=int, default=6)
    args = parser.parse_args()
    local_rank, world_size = int(os.getenv("LOCAL_RANK", "0")), int(os.getenv("WORLD_SIZE", "1"))
    args.num_envs = args.num_envs // world_size
    if world_size > 1:
        dist.init_process_group("nccl")
    else:
        warnings.warn("not distributed: start me with torchrun")
    rank = dist.get_rank()
    args.seed += rank
    random.seed(args.seed)
    torch.manual_seed(args.seed - rank)
    torch.backends.cudnn.deterministic = True
    device = torch.device(local_rank if torch.cuda.is_available() and args.cuda else "cpu")
    torch.cuda.set_device(device)
    agent = Agent().to(device)
    parallel = DistributedDataParallel(agent, device_ids=[local_rank], gradient_as_bucket_view=True)
    torch.manual_seed(args.seed)
    optimizer = torch.optim.Adam(parallel.parameters(), lr=2.5e-4, eps=1e-5, fused=True)
    envs = Corridor(args.num_envs, args.seed, device)
    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros((*shape, 6), device=device)
    actions, logprobs, rewards, dones, values = (torch.zeros(shape).to(device) for _ in range(5))
    next_obs, start = envs.observe(), time.time()
    for update in range(1, args.updates + 1):
        optimizer.param_groups[0]["lr"] = (1.0 - (update - 1.0) / args.updates) * 2.5e-4
        for step in range(args.num_steps):
            obs[step] = next_obs
            with torch.no_grad():
                action, logprob, _, value = agent(next_obs)
            actions[step], logprobs[step], values[step] = action, logprob, value
            next_obs, rewards[step], dones[step] = envs.step(action)
        with torch.no_grad():
            last = agent(next_obs)[3]
            gain = advantages(rewards, values, dones, last)
            returns = gain + values
        flat = [x.flatten(0, 1) for x in (obs, logprobs, actions, gain, returns)]
        for _ in range(2):
            for mb in torch.randperm(len(flat[0])).split(len(flat[0]) // 2):
                x, old, acted, adv, ret = (part[mb] for part in flat)
                _, new, entropy, value = parallel(x, acted.long())
                ratio = (new - old).exp()
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                policy = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).mean()
                loss = policy - 0.01 * entropy.mean() + 0.25 * (value - ret).square().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parallel.parameters(), 0.5)
                optimizer.step()
        score = rewards.sum(0).mean()
        dist.all_reduce(score, op=dist.ReduceOp.SUM)
        if rank == 0:
            print(f"update {update} return {score.item() / world_size:.3f} SPS {update * obs.numel() / (time.time() - start):.0f}")
    if rank == 0:
        torch.save(agent.state_dict(), "agent.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
