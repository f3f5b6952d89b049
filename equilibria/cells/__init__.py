"""Cells with guaranteed equilibria: monotone cells with their splittings, and constructions of representation theorems."""

from equilibria.cells.constructions import TiedLayers, stack, weight_tied_form
from equilibria.cells.monotone import MonotoneLinear
from equilibria.cells.monotone_conv import MonotoneConv2d, MonotoneTiers2d
from equilibria.cells.splitting import ForwardBackward, PeacemanRachford, Readout, tune_alpha

__all__ = [
    "ForwardBackward",
    "MonotoneConv2d",
    "MonotoneLinear",
    "MonotoneTiers2d",
    "PeacemanRachford",
    "Readout",
    "TiedLayers",
    "stack",
    "tune_alpha",
    "weight_tied_form",
]
