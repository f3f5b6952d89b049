"""Sizes of networks for optical flow."""

from __future__ import annotations

from dataclasses import dataclass

from equilibria._core.checks import require


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """The architecture of a network for optical flow.

    factor    by which features are coarser than frames: a power of two, from 2 on
    features  channels that are correlated
    context   channels of the first frame that enter every update
    hidden    channels of the recurrent state
    motion    channels that correlations and flow are encoded to
    levels    of the correlation pyramid, each half as fine as the one before
    radius    of the window looked up at every level, in its pixels
    detached  no gradient through the flow that enters an update, as in RAFT. For unrolled networks: the Jacobian of such a
              cell is not that of its equilibrium, so that exact gradients need False
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
        require(power, f"factor must be a power of two, from 2 on, got {self.factor}.")

    @property
    def window(self) -> int:
        """Correlations that are looked up for a pixel."""
        return self.levels * (2 * self.radius + 1) ** 2


FLOW_CONFIGS: dict[str, FlowConfig] = {
    "nano": FlowConfig(summary="for small frames on a CPU"),
    "small": FlowConfig(
        summary="frames of some hundred pixels",
        factor=8,
        features=128,
        context=64,
        hidden=96,
        motion=82,
        levels=4,
        radius=3,
    ),
}
