"""Modules for use inside a cell."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["VariationalDropout", "freeze_dropout"]

_CHANNELS = {nn.Dropout1d: (2,), nn.Dropout2d: (2, 3), nn.Dropout3d: (2, 3, 4)}  # whole channels are dropped


def freeze_dropout(module: nn.Module) -> nn.Module:
    """Replace every `nn.Dropout` inside `module` by a `VariationalDropout` of the same p, in place; returns the module.

    A cell with `nn.Dropout` is another function at every call in training mode and has no equilibrium. Layers of other
    libraries often have it by default: `eq.DEQ(eq.nn.freeze_dropout(layer))`.
    """
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return _frozen(module)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.modules.dropout._DropoutNd):
                setattr(parent, name, _frozen(child))
    return module


def _frozen(dropout: nn.modules.dropout._DropoutNd) -> nn.Module:
    if isinstance(dropout, (nn.AlphaDropout, nn.FeatureAlphaDropout)):
        raise TypeError(
            f"{type(dropout).__name__} changes kept values too and has no fixed-mask form here. Replace it by nn.Dropout, "
            "or set its p to 0, before freeze_dropout."
        )
    shared = next((dims for kind, dims in _CHANNELS.items() if isinstance(dropout, kind)), ())
    return VariationalDropout(dropout.p, shared=shared).train(dropout.training)


class VariationalDropout(nn.Module):
    """Dropout with a mask that is drawn once per solve, so that the cell is one function and has an equilibrium.

    A DEQ (and a `WeightTied` network) draws new masks for every forward and keeps them for all evaluations, including
    those of backward. Outside of them every call draws a new mask, as `nn.Dropout` does. Kept entries are scaled by
    1 / (1 - p). In eval mode nothing is dropped. Use one module per place in a cell: called twice in an evaluation, it
    applies the same mask.

    p          the probability that an entry is dropped
    shared     dimensions along which entries are dropped together, the mask having size 1 there: (1,) for sequences
               (batch, time, channel), (2, 3) for whole channels of images, (2,) for whole tokens; () for none
    generator  random generator of the masks; None uses torch's default
    """

    def __init__(self, p: float = 0.5, shared: tuple[int, ...] = (), generator: torch.Generator | None = None) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"VariationalDropout's p is the share that is dropped and must lie in [0, 1], got {p}.")
        self.p = p
        self.shared = tuple(shared)
        self.generator = generator
        self.held = False  # True while a solve keeps the mask
        self._source: tuple[
            VariationalDropout, ...
        ] = ()  # the module that this one is a copy of; in a tuple, so that it is not registered as a submodule
        self.mask: Tensor | None
        self.register_buffer("mask", None, persistent=False)

    @property
    def active(self) -> bool:
        """True if the module drops entries in its present mode."""
        return self.training and self.p > 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.active:
            return x
        mask = self._draw(x) if self.mask is None else self.mask
        self._keep(mask)
        if mask.shape != self._size(x):
            raise ValueError(
                f"VariationalDropout drew a mask of shape {tuple(mask.shape)} in this solve and now got a tensor of shape "
                f"{tuple(x.shape)}. Use a separate module for every place in the cell."
            )
        return x * mask.to(x.dtype)

    def follow(self, source: VariationalDropout) -> None:
        """Make this module a copy of `source`: masks drawn here are also stored there if a solve holds `source`."""
        self._source = (source,)

    def _keep(self, mask: Tensor) -> None:
        if self.held and self.mask is not mask:
            self.mask = mask
            for source in self._source:
                source._keep(mask)

    def _draw(self, x: Tensor) -> Tensor:
        size = self._size(x)
        kept = torch.rand(size, device=x.device, generator=self.generator) >= self.p
        return kept.to(x.dtype) / (1 - self.p) if self.p < 1 else torch.zeros(size, dtype=x.dtype, device=x.device)

    def _size(self, x: Tensor) -> tuple[int, ...]:
        if any(not -x.dim() <= dim < x.dim() for dim in self.shared):
            raise ValueError(
                f"VariationalDropout(shared={self.shared}) got a tensor of shape {tuple(x.shape)}, which does not have "
                "these dimensions. Change `shared`."
            )
        shared = {dim % x.dim() for dim in self.shared}
        return tuple(1 if dim in shared else size for dim, size in enumerate(x.shape))

    def extra_repr(self) -> str:
        return f"p={self.p}" + (f", shared={self.shared}" if self.shared else "")
