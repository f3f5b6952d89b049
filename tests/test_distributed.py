"""Two gloo processes on this machine: what they compute together equals what one computes on the joined batch."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn  # before the process group exists, or defaults of its functions hold the group until exit
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import equilibria as eq
import tests.conftest  # noqa: F401  # shifts the seeds in every process
from tests.problems import TanhCell, inputs, matrix

WORLD = 2
Work = Callable[[int, Path], None]  # what one process does, given its rank and a folder to write to
Found = Callable[[Work], list[Any]]
STOP = eq.Stop(rtol=1e-11, atol=0.0, max_steps=200, on_failure="raise")


def _enter(rank: int, folder: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # meets by a file: a port that was free may be taken before it is used
    store, limit = f"file://{folder / 'store'}", timedelta(minutes=10)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=limit)
    try:
        for work in WORKS:
            (folder / work.__name__).mkdir(exist_ok=True)
            work(rank, folder / work.__name__)
            dist.barrier()  # nobody goes on or tears down while another still reduces
    finally:
        gc.collect()  # of models, which are parts of reference cycles and hold the group
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return the results of one task of the processes, which are started only once because that takes longest."""
    folder = tmp_path_factory.mktemp("processes")
    spawn(_enter, (folder,), nprocs=WORLD)
    return lambda work: [torch.load(folder / work.__name__ / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


GRADIENTS: list[tuple[eq.Gradient, eq.Solver[Any]]] = [
    (eq.Implicit(), eq.Anderson()),
    (eq.JFB(), eq.Anderson()),
    (eq.UnrolledPhantom(checkpoint=True), eq.Broyden()),
    (eq.NeumannPhantom(), eq.Anderson()),
    (eq.Unrolled(), eq.Anderson()),
    (eq.Unrolled(depth=8, checkpoint="sqrt"), eq.Picard()),
    (eq.Shine(), eq.Broyden()),
    (eq.Escalate(), eq.Anderson()),
    (eq.Warmup(), eq.Anderson()),
]


def _model(stop: eq.Stop, solver: eq.Solver[Any], gradient: eq.Gradient = GRADIENTS[0][0]) -> nn.Sequential:
    torch.manual_seed(0)
    deq = eq.DEQ(TanhCell(6, norm=0.9), solver=solver, stop=stop, gradient=gradient)
    return nn.Sequential(nn.Linear(6, 6).double(), deq, nn.Linear(6, 2).double())


def _batch() -> Tensor:
    x = inputs(8, 6)
    x[4:] *= 5  # far into the saturation of tanh: the second half needs fewer steps
    return x


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _joined(solver: eq.Solver[Any], gradient: eq.Gradient = GRADIENTS[0][0]) -> dict[str, Tensor]:
    model = _model(STOP, solver, gradient)
    _loss(model, _batch()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _ddp(rank: int, folder: Path) -> None:
    grads = []
    for gradient, solver in GRADIENTS:
        model = DistributedDataParallel(_model(STOP, solver, gradient))
        _loss(model, _batch().chunk(WORLD)[rank]).backward()
        grads.append({name: p.grad for name, p in model.module.named_parameters()})
    torch.save(grads, folder / f"{rank}.pt")


def _fsdp(rank: int, folder: Path, solver: eq.Solver[Any]) -> None:
    model = _model(eq.Stop(**(vars(STOP) | {"process_group": "world"})), solver)
    deq = model[1]
    assert isinstance(deq, eq.DEQ) and isinstance(deq.cell, nn.Module)
    mesh = init_device_mesh("cpu", (WORLD,))
    fully_shard(deq.cell, mesh=mesh)  # every call of the cell is a collective
    with eq.record(model) as solutions:
        loss = _loss(model, _batch().chunk(WORLD)[rank])
    loss.backward()
    grads = {}
    for name, p in model.named_parameters():
        grad = p.grad
        assert grad is not None
        if isinstance(grad, DTensor):
            grads[name] = grad.full_tensor()
        else:
            dist.all_reduce(grad)
            grads[name] = grad / WORLD
    needed = solutions[0].stats.steps.max()
    torch.save(
        {"grads": grads, "steps": needed, "evaluations": torch.tensor(solutions[0].stats.evaluations)}, folder / f"{rank}.pt"
    )


def _fsdp_anderson(rank: int, folder: Path) -> None:
    _fsdp(rank, folder, eq.Anderson())


def _fsdp_newton(rank: int, folder: Path) -> None:
    _fsdp(rank, folder, eq.Newton())


def _fsdp_without_group(rank: int, folder: Path) -> None:
    deq = _model(STOP, eq.Anderson())[1]
    assert isinstance(deq, eq.DEQ) and isinstance(deq.cell, nn.Module)
    fully_shard(deq.cell, mesh=init_device_mesh("cpu", (WORLD,)))
    try:
        deq(_batch())
    except ValueError as error:
        torch.save({"refused": "process_group" in str(error)}, folder / f"{rank}.pt")


def _fsdp_one_row(rank: int, folder: Path) -> None:
    deq = _model(eq.Stop(**(vars(STOP) | {"process_group": "world"})), eq.Anderson())[1]
    assert isinstance(deq, eq.DEQ) and isinstance(deq.cell, nn.Module)
    fully_shard(deq.cell, mesh=init_device_mesh("cpu", (WORLD,)))
    stats = deq.solve(_batch()[:7] if rank == 0 else _batch()[7:]).stats
    torch.save({"converged": stats.converged, "evaluations": torch.tensor(stats.evaluations)}, folder / f"{rank}.pt")


class Shrinking(nn.Module):
    """tanh(z W + x): beside a small x, states of any size become as small."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(matrix("orthogonal", 6, 0.5).contiguous())

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.w + x)


# (scale of the inputs, start, scale of the loss) on one rank; 1, 0 and 1 on the other; largest number of steps; solver.
# Squares of numbers below 1e-154 and above 1e154 leave float64.
FAR: dict[str, tuple[tuple[float, float, float], int, eq.Solver[Any] | eq.Fallback]] = {
    "small inputs": ((1e-170, 0.0, 1.0), 200, eq.Anderson()),
    "small inputs, steady state": ((1e-170, 0.0, 1.0), 200, eq.SteadyState(first_step=None)),
    "small inputs, failed": ((1e-170, 0.0, 1.0), 2, eq.Picard()),
    "shrinking": ((1e-170, 1e-140, 1.0), 400, eq.Picard()),
    "shrinking, chain": ((1e-170, 1e-140, 1.0), 400, eq.Fallback(eq.Picard(), eq.Anderson())),
    "shrinking, failed": ((1e-170, 1e-140, 1.0), 60, eq.Picard()),
    "small loss": ((1.0, 0.0, 1e-200), 200, eq.Anderson()),
    "large loss": ((1.0, 0.0, 1e200), 200, eq.Anderson()),
    "infinite loss": ((1.0, 0.0, float("inf")), 200, eq.Anderson()),
}


def _far(case: str, rank: int, shard: bool) -> dict[str, Tensor]:
    (scale, start, loss), steps, solver = FAR[case]
    x = inputs(4, 6)[2 * rank :][:2]
    scale, start, loss = (scale, start, loss) if rank == 0 else (1.0, 0.0, 1.0)
    stop = eq.Stop(rtol=1e-8, atol=0.0, max_steps=steps, on_failure="ignore", process_group="world" if shard else None)
    cell = Shrinking()
    if shard:
        fully_shard(cell, mesh=init_device_mesh("cpu", (WORLD,)))
    init = lambda x: torch.full_like(x, start)  # noqa: E731
    x = (scale * x).requires_grad_()
    gradient = eq.Implicit(stop=stop, on_failure="ignore")
    s = eq.DEQ(cell, init=init, solver=solver, stop=stop, gradient=gradient).solve(x)
    (loss * s.z.sum()).backward()
    assert x.grad is not None
    found = {"z": s.z.detach() / scale, "grad": x.grad / loss, "status": s.stats.status, "residual": s.stats.residual}
    return found | {"evaluations": torch.tensor(s.stats.evaluations)}


def _fsdp_scales(rank: int, folder: Path) -> None:
    torch.save({case: _far(case, rank, shard=True) for case in FAR}, folder / f"{rank}.pt")


WORKS: tuple[Work, ...] = (_ddp, _fsdp_anderson, _fsdp_newton, _fsdp_without_group, _fsdp_one_row, _fsdp_scales)


def _assert_grads(seen: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-8, atol: float = 1e-10) -> None:
    assert seen.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(seen[name], expected[name], rtol=rtol, atol=atol)


def test_ddp_gradients_equal_one_process_on_the_joined_batch(found: Found) -> None:
    """This covers every gradient that does not store data of one process."""
    for grads in found(_ddp):
        for seen, (gradient, solver) in zip(grads, GRADIENTS, strict=True):
            # Shine's last factors are differences of converged iterates, rounding that moves with the batch size
            rough = {"rtol": 1e-3, "atol": 1e-5} if isinstance(gradient, eq.Shine) else {}
            _assert_grads(seen, _joined(solver, gradient), **rough)


def test_fsdp_finishes_where_ranks_need_different_steps(found: Found) -> None:
    first, second = found(_fsdp_anderson)
    assert first["steps"] != second["steps"]
    assert first["evaluations"] == second["evaluations"]
    _assert_grads(first["grads"], _joined(eq.Anderson()))


def test_fsdp_finishes_with_inner_loops_of_newton(found: Found) -> None:
    first, second = found(_fsdp_newton)
    assert first["evaluations"] == second["evaluations"]
    _assert_grads(first["grads"], _joined(eq.Newton()))


def test_fsdp_without_a_process_group_is_refused_instead_of_hanging(found: Found) -> None:
    assert all(result["refused"] for result in found(_fsdp_without_group))


def test_ranks_measure_an_answer_together_if_the_rows_of_one_stop_apart(found: Found) -> None:
    """The rank with a single row, whose answer comes from one step, evaluates the cell as often as the other rank."""
    one, other = found(_fsdp_one_row)
    assert bool(one["converged"].all()) and bool(other["converged"].all())
    assert int(one["evaluations"]) == int(other["evaluations"])


@pytest.mark.parametrize("case", FAR)
def test_ranks_evaluate_together_if_the_numbers_of_one_leave_the_range_of_squares(found: Found, case: str) -> None:
    """A rank that evaluated its cell alone would wait for the other one for ever."""
    ranks = [result[case] for result in found(_fsdp_scales)]
    assert int(ranks[0]["evaluations"]) == int(ranks[1]["evaluations"])
    for rank, seen in enumerate(ranks):
        alone = _far(case, rank, shard=False)
        assert torch.equal(seen["status"], alone["status"])
        for name in ("z", "grad", "residual"):
            torch.testing.assert_close(seen[name], alone[name], rtol=1e-6, atol=1e-7, equal_nan=True)
