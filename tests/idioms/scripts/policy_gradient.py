"""Proximal policy optimisation: no loader, rollouts seeded by rank, minibatches from a shuffled buffer."""

import argparse
import os
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    seed: int = 1
    iterations: int = 6
    num_steps: int = 32
    update_epochs: int = 2
    minibatch_size: int = 16
    clip_coef: float = 0.2
    target_kl: float = 0.5


class Corridor:
    """Walk to the right end; the reward waits there."""

    def __init__(self, rng):
        self.rng = rng
        self.position = 0

    def reset(self):
        self.position = int(self.rng.integers(0, 3))
        return self.observe()

    def observe(self):
        view = np.zeros(8, dtype=np.float32)
        view[self.position] = 1.0
        return view

    def step(self, action):
        self.position = min(max(self.position + (1 if action else -1), 0), 7)
        done = self.position == 7
        reward = 1.0 if done else -0.05
        return (self.reset() if done else self.observe()), reward, done


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, x, action=None):
        distribution = Categorical(logits=self.actor(x))
        if action is None:
            action = distribution.sample()
        return action, distribution.log_prob(action), distribution.entropy(), self.critic(x).squeeze(-1)


def rollout(environment, agent, observation, steps):
    rows = []
    for _ in range(steps):
        with torch.no_grad():
            action, logprob, _, value = agent(torch.from_numpy(observation)[None])
        following, reward, done = environment.step(action.item())
        rows.append((torch.from_numpy(observation), action[0], logprob[0], value[0], reward, float(done)))
        observation = following
    observations, actions, logprobs, values, rewards, dones = map(list, zip(*rows, strict=True))
    returns, running = torch.zeros(steps), 0.0
    for t in reversed(range(steps)):
        running = rewards[t] + 0.99 * running * (1 - dones[t])
        returns[t] = running
    return observation, torch.stack(observations), torch.stack(actions), torch.stack(logprobs), torch.stack(values), returns


def main(args):
    dist.init_process_group("gloo")
    local_rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    args.seed += local_rank
    torch.manual_seed(args.seed - local_rank)
    agent = DistributedDataParallel(Agent())
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    environment = Corridor(rng)
    observation = environment.reset()
    start = time.time()
    for iteration in range(1, args.iterations + 1):
        for group in optimizer.param_groups:
            group["lr"] = (1.0 - (iteration - 1.0) / args.iterations) * 2.5e-3
        observation, obs, actions, logprobs, values, returns = rollout(
            environment, agent.module, observation, args.num_steps
        )
        indices = np.arange(args.num_steps)
        for _ in range(args.update_epochs):
            rng.shuffle(indices)
            for begin in range(0, args.num_steps, args.minibatch_size):
                mb = indices[begin : begin + args.minibatch_size]
                _, newlogprob, entropy, newvalue = agent(obs[mb], actions[mb])
                ratio = (newlogprob - logprobs[mb]).exp()
                advantages = returns[mb] - values[mb]
                advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
                clipped = torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
                policy_loss = torch.max(-advantages * ratio, -advantages * clipped).mean()
                loss = policy_loss - 0.01 * entropy.mean() + 0.5 * ((newvalue - returns[mb]) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
            approx_kl = (logprobs[mb] - newlogprob).mean().detach()
            dist.all_reduce(approx_kl)
            if approx_kl / world_size > args.target_kl:
                break
        if local_rank == 0:
            print(f"iteration {iteration}: {iteration * args.num_steps * world_size / (time.time() - start):.0f} steps/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--iterations", type=int, default=6)
    main(Args(**vars(parser.parse_args())))
