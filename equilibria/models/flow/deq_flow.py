"""DEQ-Flow: optical flow as the equilibrium of a recurrent update, and the same update unrolled."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equilibria.deq import DEQ, sample_keys
from equilibria.explicit import WeightTied
from equilibria.gradients.base import Gradient
from equilibria.gradients.phantom import JFB
from equilibria.models.flow.cell import Encoder, FlowCell, FlowStart, FlowState, Upsample
from equilibria.models.flow.configs import FlowConfig
from equilibria.penalties import correction_states
from equilibria.remember import Keys, Remember
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.fallback import AnySolver
from equilibria.stop import Stop

TRAINING = Stop(rtol=1e-2, max_steps=24, keep_every=3, on_failure="ignore")


class DEQFlow(nn.Module):
    """Computes optical flow as the equilibrium (hidden state, flow) of RAFT's update (Bai and others 2022).

        model = eq.models.create("deq-flow-nano")
        flow = model(frames)  # (batch, 2, height, width) from frames (batch, 2, 3, height, width)
        flows = model.video(frames)  # from frames (batch, n, 3, height, width); solves start from the last equilibrium

    Frames must have mean 0 and deviation 1. The flow is in pixels: the point (x, y) of the first frame is at (x, y) + flow
    in the second frame.

    depth        None: the equilibrium; a number: the update is unrolled that many times
    solver       solver of the equilibrium
    stop         stop of the solve in training; `keep_every` keeps iterates for corrections
    gradient     gradient of the equilibrium
    eval_stop    stop in eval mode; None: `stop`
    corrections  number of intermediate iterates that training supervises too
    correction_steps  number of steps of the phantom gradient of each of these iterates
    """

    def __init__(
        self,
        config: FlowConfig,
        *,
        depth: int | None = None,
        solver: AnySolver = Anderson(),
        stop: Stop = TRAINING,
        gradient: Gradient = JFB(),
        eval_stop: Stop | None = None,
        corrections: int = 2,
        correction_steps: int = 1,
    ) -> None:
        super().__init__()
        self.config, self.corrections, self.correction_steps = config, corrections, correction_steps
        self.features = Encoder(config.features, config.factor)
        self.context = Encoder(config.context, config.factor)
        cell, start = FlowCell(config), FlowStart(config.hidden)
        self.layer: DEQ | WeightTied
        if depth is None:
            self.layer = DEQ(cell, Remember(start), solver, stop, gradient, eval_stop)
        else:
            self.layer = WeightTied(cell, depth, start)
        self.upsample = Upsample(config)

    def forward(self, frames: Tensor, *, on_the_way: bool = False) -> Tensor | list[Tensor]:
        """Return the flow from the first of two frames to the second.

        on_the_way  return a list of flows for `eq.correction_penalty`: those of intermediate iterates, each with its own
                    gradient, and last the flow itself
        """
        inputs = self.inputs(self._checked(frames, 2))
        if not on_the_way:
            return self.upsample(self.layer(*inputs))
        return [self.upsample(state) for state in self._states(inputs)]

    def video(self, frames: Tensor, *, keys: Keys | None = None) -> Tensor:
        """Return the flows (batch, n - 1, 2, height, width) between the frames (batch, n, 3, height, width) of videos.

        Every solve starts from the equilibrium of the preceding pair of frames of the same video, if that solve converged.
        An unrolled network always starts from zeros.

        keys  one name per video. A video with the same name in a later call starts from its last equilibrium, until
              `model.layer.init.forget(keys)`. None: every video starts from zeros
        """
        names = [object() for _ in range(len(frames))] if keys is None else keys
        with sample_keys(self, names):
            flows = [self(frames[:, i : i + 2]) for i in range(frames.shape[1] - 1)]
        if keys is None and isinstance(self.layer.init, Remember):
            self.layer.init.forget(names)
        return torch.stack(flows, dim=1)

    def inputs(self, frames: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of the layer: features of both frames, and the context."""
        first, second = self.features(frames.flatten(0, 1)).unflatten(0, frames.shape[:2]).unbind(dim=1)
        return first, second, torch.relu(self.context(frames[:, 0]))

    def _states(self, inputs: tuple[Tensor, ...]) -> list[FlowState]:
        if isinstance(self.layer, WeightTied):
            return list(self.layer.trajectory(*inputs).states[1:])
        return correction_states(self.layer.solve(*inputs), steps=self.correction_steps, most=self.corrections)

    def _checked(self, frames: Tensor, count: int) -> Tensor:
        factor = self.config.factor
        if frames.dim() != 5 or frames.shape[1:3] != (count, 3) or any(size % factor for size in frames.shape[3:]):
            raise ValueError(
                f"Frames must have the shape (batch, {count}, 3, height, width) with height and width divisible by "
                f"{factor}, got {tuple(frames.shape)}. Stack two frames in dimension 1, and pad or crop them."
            )
        return frames
