"""Data-parallel training of a DEQ: gradients are averaged, and no process waits for the solver of another one.

torchrun --nproc-per-node 2 examples/two_processes.py
"""

import gc

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported after the group exists, its defaults would keep the group until exit
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import equilibria as eq


class Cell(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(z) + x)


def train(rank: int, processes: int) -> None:
    torch.manual_seed(0)  # the same weights and data everywhere
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), eq.DEQ(Cell(16)), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(64, 4)
    y = x.sin().sum(dim=1, keepdim=True)
    mine = slice(rank, None, processes)
    for _ in range(50):
        with eq.record(model) as solutions:
            loss = (model(x[mine]) - y[mine]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    steps = [torch.zeros(1) for _ in range(processes)]
    dist.all_gather(steps, torch.tensor([float(solutions[0].stats.steps.max())]))
    if rank == 0:
        print(f"loss {loss.item():.4f}; steps of the last solve by process: {[int(s) for s in steps]}")


def main() -> None:
    dist.init_process_group("gloo")
    train(dist.get_rank(), dist.get_world_size())
    gc.collect()  # frees the model, which is part of a reference cycle and keeps the group
    dist.destroy_process_group()  # joins the group's threads; one that runs at exit may abort the process


if __name__ == "__main__":
    main()
