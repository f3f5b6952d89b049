"""Configurations of networks for optical flow."""

from __future__ import annotations

from dataclasses import dataclass

from equilibria._core.checks import require


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """The architecture of a network for optical flow.

    factor    ratio of the sizes of frames and features, a power of two and at least 2
    features  number of channels that are correlated
    context   number of channels of the first frame that enter every update
    hidden    number of channels of the recurrent state
    motion    number of channels to which correlations and flow are encoded
    levels    number of levels of the correlation pyramid; each has half the height and width of the one before
    radius    radius of the window of correlations at every level, in pixels of the level
    detached  stop gradients through the flow that enters an update, as RAFT does. Only for unrolled networks: the Jacobian
              of such a cell is not that of the equilibrium, so its implicit gradient is wrong
    """

    summary: str = ""
    factor: int = 4
    features: int = 32
    context: int = 24
    hidden: int = 32
    motion: int = 24
    levels: int = 2
    radius: int = 2
    detached: bool = False

    def __post_init__(self) -> None:
        for name in ("features", "context", "hidden", "motion", "levels", "radius"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}.")
        power = self.factor >= 2 and self.factor & (self.factor - 1) == 0
        require(power, f"factor must be a power of two and at least 2, got {self.factor}.")

    @property
    def window(self) -> int:
        """Number of correlations in the windows of one pixel."""
        return self.levels * (2 * self.radius + 1) ** 2


FLOW_CONFIGS: dict[str, FlowConfig] = {
    "nano": FlowConfig(summary="for small frames on a CPU"),
    "small": FlowConfig(
        summary="for frames of some hundred pixels",
        factor=8,
        features=128,
        context=64,
        hidden=96,
        motion=82,
        levels=4,
        radius=3,
    ),
}
