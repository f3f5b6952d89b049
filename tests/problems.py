"""Fixed-point problems whose answer is known, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import equilibria as eq

FlatMap = Callable[[Tensor], Tensor]
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])  # the version, for features that ask for one

# f(z) - z is computed with an error of a few eps |z|; below this tolerance float64 has nothing left to compare
TIGHT = eq.Stop(rtol=1e-13, atol=1e-14, max_steps=1000, on_failure="raise")

ALL_SOLVERS = [
    eq.Picard(),
    eq.Picard(damping=0.5),
    eq.Anderson(),
    eq.Anderson(history=3, damping=0.8, ridge=1e-8),
    eq.Broyden(),
    eq.Broyden(history=10, line_search=True),
    eq.Newton(),
    eq.Newton(linear=eq.BiCGSTAB()),
    eq.Newton(line_search=False),
    eq.solvers.TrustRegion(),
    eq.solvers.TrustRegion(linear=eq.BiCGSTAB()),
    eq.solvers.PseudoTransient(),
    eq.solvers.DFSane(),
    eq.Restart(eq.Anderson(), every=12),
    eq.SteadyState(),
    eq.SteadyState(method="bs3", first_step=None),
    eq.SteadyState(method="dopri5", rtol=1e-2),
    eq.SteadyState(method="heun", rtol=0.1),
    eq.Fallback(eq.Picard(), eq.Anderson(), eq.Newton()),
    eq.Robust(),
    eq.GMRES(),
    eq.GMRES(restart=15),
    eq.BiCGSTAB(),
    eq.NormalCG(),
]
LINEAR_SOLVERS = [eq.GMRES(), eq.GMRES(restart=15), eq.BiCGSTAB(), eq.NormalCG()]
NONLINEAR_SOLVERS = [solver for solver in ALL_SOLVERS if solver not in LINEAR_SOLVERS]
STRONG_SOLVERS = [eq.Anderson(), eq.Broyden(), eq.Newton(), eq.solvers.TrustRegion()]  # also where plain iteration diverges


def name(solver: object) -> str:
    return repr(solver)


@dataclass(frozen=True)
class Problem:
    f: FlatMap
    z0: Tensor
    exact: Tensor


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def orthogonal(n: int, seed: int) -> Tensor:
    q, r = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator(seed)))
    return q * r.diagonal().sign()


def matrix(kind: str, n: int, norm: float, seed: int = 0) -> Tensor:
    """Return a matrix of that spectral norm with truly slow directions, unlike a Gaussian one."""
    q = orthogonal(n, seed)
    if kind == "orthogonal":
        return norm * q
    if kind == "symmetric":
        spectrum = torch.linspace(-norm, norm, n, dtype=torch.float64) if n > 1 else torch.tensor([norm]).double()
        return (q * spectrum) @ q.T
    if kind == "rotation":  # by a right angle in every plane: plain iteration at norm 1 goes round for ever
        blocks = [torch.tensor([[0.0, -norm], [norm, 0.0]], dtype=torch.float64)] * (n // 2)
        return torch.block_diag(*blocks)
    raise ValueError(kind)


def affine(kind: str, n: int, norm: float, batch: int = 3, seed: int = 0) -> Problem:
    w = matrix(kind, n, norm, seed)
    x = torch.randn(batch, n, dtype=torch.float64, generator=generator(seed + 1))
    exact = torch.linalg.solve(torch.eye(n, dtype=torch.float64) - w, x.T).T
    return Problem(lambda z: z @ w.T + x[: z.shape[0]], torch.zeros_like(x), exact)


def cosine(batch: int = 2) -> Problem:
    exact = torch.full((batch, 1), 0.7390851332151607, dtype=torch.float64)
    return Problem(torch.cos, torch.zeros(batch, 1, dtype=torch.float64), exact)


class TanhCell(nn.Module):
    """tanh(W z + U x + b) with |W| = norm, the standard test cell."""

    def __init__(
        self, n: int, norm: float = 0.8, kind: str = "orthogonal", seed: int = 0, dtype: torch.dtype = torch.float64
    ):
        super().__init__()
        self.w = nn.Parameter(matrix(kind, n, norm, seed).to(dtype).contiguous())
        self.u = nn.Parameter(matrix("orthogonal", n, 1.0, seed + 1).to(dtype).contiguous())
        self.b = nn.Parameter(0.1 * torch.randn(n, dtype=dtype, generator=generator(seed + 2)))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.w.T + x @ self.u.T + self.b)


class AffineCell(nn.Module):
    """W z + x, whose Jacobian is W for every sample."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w.contiguous())

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return z @ self.w.T + x


class BatchNormCell(nn.Module):
    """A cell with batch norm, which couples samples in training."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.inner = TanhCell(n, norm=0.5)
        self.norm = nn.BatchNorm1d(n, dtype=torch.float64)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.inner(z, x)) * 0.3
        return out


class NestedCell(nn.Module):
    """A cell on a state {"a": tensor, "b": (tensor, [tensor])} whose parts depend on each other."""

    def __init__(self, seed: int = 0):
        super().__init__()
        self.a = nn.Parameter(matrix("orthogonal", 4, 0.5, seed))
        self.b = nn.Parameter(0.3 * torch.randn(3, 4, dtype=torch.float64, generator=generator(seed + 5)))

    def forward(self, z: dict[str, object], x: Tensor) -> dict[str, object]:
        a = z["a"]
        assert isinstance(a, Tensor)
        first, (second,) = z["b"]  # type: ignore[misc]
        return {
            "a": torch.tanh(a @ self.a.T + x + 0.2 * first.mean(dim=(1, 2)).unsqueeze(1)),  # type: ignore[has-type]
            "b": (
                torch.sin(0.3 * first + (a @ self.b.T).unsqueeze(1)),  # type: ignore[has-type]
                [0.5 * second + a[:, 0]],  # type: ignore[has-type]
            ),
        }

    @staticmethod
    def zeros(x: Tensor) -> dict[str, object]:
        batch = x.shape[0]
        return {"a": torch.zeros_like(x), "b": (x.new_zeros(batch, 2, 3), [x.new_zeros(batch)])}


def inputs(batch: int, n: int, seed: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, n, dtype=torch.float64, generator=generator(seed)).to(dtype)


def unrolled(f: Callable[..., Tensor], z: Tensor, *args: Tensor, steps: int = 200) -> Tensor:
    """Return the result of plain iteration with its graph, the reference for gradients of contractions."""
    for _ in range(steps):
        z = f(z, *args)
    return z


def stored_bytes(deq: eq.DEQ, x: Tensor) -> int:
    """Return the bytes that autograd keeps between forward and backward, each storage once and without weights."""
    weights = {p.untyped_storage().data_ptr() for p in deq.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage  # held, or a later tensor could lie at the same address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        z = deq(x)
    z.sum().backward()
    return sum(storage.nbytes() for storage in storages.values())
