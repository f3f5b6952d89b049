"""Sizes of reasoners: those of the Tiny Recursive Model and of Equilibrium Reasoners, and small ones for a CPU."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from equilibria._core.checks import require
from equilibria.models.reasoning.blocks import Mixer

ReasonerStart = Literal["fixed", "learned", "random"]
NoisePer = Literal["solve", "call"]


@dataclass(frozen=True, kw_only=True)
class ReasonerConfig:
    """The architecture of a reasoner.

    tokens      number of different input tokens, and of answers
    positions   number of positions of a sample; only the mixer "mlp" needs exactly this number
    registers   number of positions with learned embeddings before the sample's own; the published puzzle embedding has 16
    mixer       "mlp": a SwiGLU over all positions. "attention": attention with rotary positions. "line" and "square": a
                convolution over nearest neighbours of a sequence or of a square board; information then moves one position
                per application
    multiple    hidden widths of the SwiGLUs are rounded up to a multiple of this
    h_cycles    number of recursions in one supervised step; only the last one has a gradient
    l_cycles    number of updates of the scratch pad in a recursion
    relaxation  share of the block's output in the new state
    noise       standard deviation of the normal noise that is added to a state
    noise_per   "solve": the noise is drawn once per solve; "call": at every call of the cell
    eval_noise  add the noise in eval mode too, as published. Without it the residuals of trained models become small
    start       "random": draws for every sample; "fixed": vectors drawn once; "learned": trained vectors
    """

    summary: str = ""
    tokens: int = 11
    positions: int = 81
    registers: int = 0
    width: int = 512
    heads: int = 8
    layers: int = 2
    mixer: Mixer = "mlp"
    expansion: float = 4.0
    multiple: int = 256
    h_cycles: int = 3
    l_cycles: int = 6
    relaxation: float = 1.0
    noise: float = 0.0
    noise_per: NoisePer = "solve"
    eval_noise: bool = True
    start: ReasonerStart = "fixed"

    def __post_init__(self) -> None:
        for name in ("tokens", "positions", "width", "layers", "multiple", "h_cycles", "l_cycles"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}.")
        for name, kind in (("mixer", Mixer), ("start", ReasonerStart), ("noise_per", NoisePer)):
            choices = get_args(kind)
            require(getattr(self, name) in choices, f"{name} must be one of {choices}, got {getattr(self, name)!r}.")
        require(self.registers >= 0, f"registers must not be negative, got {self.registers}.")
        require(
            self.registers == 0 or self.mixer in ("mlp", "attention"),
            f"mixer={self.mixer!r} needs registers=0, got {self.registers}: registers have no position on the board.",
        )
        require(0 < self.relaxation <= 1, f"relaxation must lie in (0, 1], got {self.relaxation}.")
        require(self.noise >= 0, f"noise must not be negative, got {self.noise}.")

    def attractor(self) -> ReasonerConfig:
        """Return this configuration with the relaxation, noise and random starts of Equilibrium Reasoners."""
        return dataclasses.replace(self, relaxation=0.95, noise=0.01, start="random")


_SUDOKU = ReasonerConfig(summary="Sudoku 9x9, width 512", registers=16)
_MAZE = ReasonerConfig(
    summary="mazes 30x30, width 128", tokens=6, positions=900, mixer="attention", width=128, layers=1, l_cycles=4
)
_NANO = ReasonerConfig(
    summary="Sudoku 4x4, for a CPU",
    tokens=5,
    positions=16,
    width=64,
    heads=4,
    layers=1,
    multiple=16,
    h_cycles=2,
    l_cycles=2,
)
# those of the tables of results; wide noise in training, and none in evaluation, lets their states settle
_BOARD = dataclasses.replace(_NANO, width=32, h_cycles=3, l_cycles=1).attractor()
_BOARD = dataclasses.replace(_BOARD, relaxation=0.5, noise=0.1, eval_noise=False)
REASONER_CONFIGS: dict[str, ReasonerConfig] = {
    "nano": _NANO.attractor(),
    "trm-nano": _NANO,
    "trm-sudoku": _SUDOKU,
    "eqr-sudoku": _SUDOKU.attractor(),
    "eqr-maze": _MAZE.attractor(),
    "eqr-sudoku-4x4": _BOARD,
    "eqr-sudoku-6x6": dataclasses.replace(_BOARD, summary="Sudoku 6x6, for a CPU", tokens=7, positions=36, width=64),
}
