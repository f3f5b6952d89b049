"""Coefficients of explicit Runge-Kutta pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tableau:
    """Coefficients of z <- z + dt sum_j rows[-1][j] k_j for an autonomous equation, which needs no nodes.

    The last row holds the weights of the step. The last stage is the slope at the new point, which is also the first stage
    of the next step.
    """

    order: int
    rows: tuple[tuple[float, ...], ...]  # of stages 2, 3, ...
    error: tuple[float, ...]  # weights of the embedded formula less those of the step, one per stage
    stable: float  # the largest dt for which steps on dz/dt = -z do not grow
    edge: float  # |sum_j error_j k_j| / |k_1| at that dt


HEUN = Tableau(
    order=2,
    rows=((1,), (1 / 2, 1 / 2)),  # the classical two stages; the third gives the residual at the new point
    error=(1 / 2, -1 / 2, 0),  # Euler's formula is embedded
    stable=2.0,
    edge=1.0,
)

BS3 = Tableau(  # Bogacki and Shampine 1989
    order=3,
    rows=((1 / 2,), (0, 3 / 4), (2 / 9, 1 / 3, 4 / 9)),
    error=(5 / 72, -1 / 12, -1 / 9, 1 / 8),
    stable=2.513,
    edge=0.1990,
)

TSIT5 = Tableau(  # Tsitouras 2011
    order=5,
    rows=(
        (0.161,),
        (-0.008480655492356989, 0.335480655492357),
        (2.8971530571054935, -6.359448489975075, 4.3622954328695815),
        (5.325864828439257, -11.748883564062828, 7.4955393428898365, -0.09249506636175525),
        (5.86145544294642, -12.92096931784711, 8.159367898576159, -0.071584973281401, -0.028269050394068383),
        (0.09646076681806523, 0.01, 0.4798896504144996, 1.379008574103742, -3.290069515436081, 2.324710524099774),
    ),
    error=(
        -0.00178001105222577714,
        -0.0008164344596567469,
        0.007880878010261995,
        -0.1447110071732629,
        0.5823571654525552,
        -0.45808210592918697,
        1 / 66,
    ),
    stable=3.507,
    edge=0.1876,
)

DOPRI5 = Tableau(  # Dormand and Prince 1980
    order=5,
    rows=(
        (1 / 5,),
        (3 / 40, 9 / 40),
        (44 / 45, -56 / 15, 32 / 9),
        (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
        (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
        (35 / 384, 0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
    ),
    error=(-71 / 57600, 0, 71 / 16695, -71 / 1920, 17253 / 339200, -22 / 525, 1 / 40),
    stable=3.307,
    edge=0.2795,
)

Method = Literal["tsit5", "bs3", "dopri5", "heun"]
TABLEAUS: dict[Method, Tableau] = {"tsit5": TSIT5, "bs3": BS3, "dopri5": DOPRI5, "heun": HEUN}


def weighted_sum(weights: Sequence[float], slopes: Sequence[Tensor]) -> Tensor:
    """Return sum_j weights[j] slopes[j], without the terms of weight 0."""
    total = weights[0] * slopes[0]
    for weight, slope in zip(weights[1:], slopes[1:], strict=True):
        if weight:
            total = torch.add(total, slope, alpha=weight)
    return total
