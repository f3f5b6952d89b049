"""Monotone operator networks as a task on images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from equilibria.lab.experiments.image_task import Batch, ImageSettings, ImageTask, inside
from equilibria.lab.training.task import Outcome
from equilibria.models.images.monotone_nets import (
    MonotoneConfig,
    MonotoneConvConfig,
    MonotoneMLPConfig,
    MonotoneNet,
    MonotoneTiersConfig,
    SplittingConfig,
    SplittingMethod,
)
from equilibria.models.solve_options import relative_stop

RETUNE = 100  # training steps after which the splitting's alpha is chosen again


@dataclass(frozen=True, kw_only=True)
class MonotoneSettings(ImageSettings):
    """Settings of a monotone operator network.

    kind       "mlp", "conv" or "tiers"
    channels   width of "mlp", channels of "conv" (one number), or channels of every tier
    method     operator splitting; its alpha is chosen again every 100 training steps: for Peaceman-Rachford by trial on a
               batch, for forward-backward as half of the largest allowed value
    tolerance  relative tolerance of the equilibrium and of its adjoint
    """

    kind: Literal["mlp", "conv", "tiers"] = "mlp"
    channels: tuple[int, ...] = (87,)
    method: SplittingMethod = "peaceman-rachford"
    tolerance: float = 1e-2
    max_steps: int = 300


class Monotone(ImageTask):
    """Trains a monotone operator network; the splitting's alpha is part of the run's state."""

    def __init__(self, settings: MonotoneSettings) -> None:
        super().__init__(settings.data)
        self.settings = settings
        self._alpha: float | None = None

    def model(self) -> nn.Module:
        s = self.settings
        stop = relative_stop(s.tolerance, s.max_steps)
        model = MonotoneNet(self._config(), splitting=SplittingConfig(method=s.method), stop=stop)
        if s.method == "forward-backward":
            model.make_safe_()
        return model

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Outcome:
        net = inside(model, MonotoneNet)
        if step % RETUNE == 0:
            self._alpha = net.tune_alpha_(batch[0]) if self.settings.method == "peaceman-rachford" else net.make_safe_()
        elif self._alpha is not None:
            net.splitting.alpha = self._alpha  # alpha is not in the state dict; a resumed run sets it here
        return super().loss(model, batch, step)

    def evaluate(self, model: nn.Module, batch: Batch) -> Outcome:
        if self.settings.method == "forward-backward":
            inside(model, MonotoneNet).make_safe_()  # the weights have changed since alpha was chosen
        return super().evaluate(model, batch)

    def state(self) -> Any:
        return {"alpha": self._alpha}

    def resume(self, state: Any) -> None:
        self._alpha = state["alpha"]

    def _config(self) -> MonotoneConfig:
        """Return the configuration of the network; raises ValueError for a wrong number of channels."""
        s = self.settings
        if s.kind == "tiers":
            return MonotoneTiersConfig(image=s.data.shape, channels=s.channels)
        if len(s.channels) != 1:
            raise ValueError(f'channels must be one number for kind "{s.kind}", got {s.channels}.')
        if s.kind == "conv":
            return MonotoneConvConfig(image=s.data.shape, channels=s.channels[0])
        return MonotoneMLPConfig(image=s.data.shape, width=s.channels[0])
