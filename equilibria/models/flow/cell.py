"""The recurrent update of optical flow as a cell, and the networks around it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.models.flow.configs import FlowConfig
from equilibria.models.flow.correlation import correlation_pyramid, look_up

FlowState = tuple[Tensor, Tensor]  # hidden state (batch, hidden, h, w), and flow (batch, 2, h, w) in pixels of the features
GROUPS = 4  # number of groups of every group norm


class FlowCell(nn.Module):
    """One update of RAFT (Teed and Deng 2020) on (h, flow).

        m     = encode(correlations around the end points of the flow, flow)
        h'    = GRU(h, m, context)
        flow' = flow + head(h')

    At the equilibrium head(h') = 0: further updates change neither the flow nor the hidden state.
    """

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self.config, hidden = config, config.hidden
        seen = config.motion + 2
        self.correlated = nn.Conv2d(config.window, config.motion, 1)
        self.encode = nn.Conv2d(seen, config.motion, 3, padding=1)
        self.context = nn.Conv2d(config.context, 3 * hidden, 3, padding=1)
        self.gates = nn.Conv2d(hidden + seen, 2 * hidden, 3, padding=1, bias=False)
        self.candidate = nn.Conv2d(hidden + seen, hidden, 3, padding=1, bias=False)
        self.head = nn.Sequential(
            nn.Conv2d(hidden, hidden, 3, padding=1), nn.ReLU(), nn.Conv2d(hidden, 2, 3, padding=1, bias=False)
        )

    def prepare(self, first: Tensor, second: Tensor, context: Tensor) -> tuple[Tensor, ...]:
        """Return what is equal in all updates: the part of the gates that depends on the context, and the correlations."""
        return self.context(context), *correlation_pyramid(first, second, self.config.levels)

    def forward(self, z: FlowState, context: Tensor, *pyramid: Tensor) -> FlowState:
        h, flow = z
        flow = flow.detach() if self.config.detached else flow
        correlated = F.relu(self.correlated(look_up(pyramid, flow, self.config.radius)))
        motion = torch.cat([F.relu(self.encode(torch.cat([correlated, flow], dim=1))), flow], dim=1)
        hidden = self.config.hidden
        gates = torch.sigmoid(self.gates(torch.cat([h, motion], dim=1)) + context[:, : 2 * hidden])
        update, reset = gates.chunk(2, dim=1)
        new = torch.tanh(self.candidate(torch.cat([reset * h, motion], dim=1)) + context[:, 2 * hidden :])
        h = torch.lerp(h, new, update)
        return h, flow + self.head(h)


class FlowStart:
    """An `init` with zeros for the hidden state and the flow."""

    def __init__(self, hidden: int) -> None:
        self.hidden = hidden

    def __repr__(self) -> str:
        return f"FlowStart({self.hidden})"

    def __call__(self, first: Tensor, second: Tensor, context: Tensor) -> FlowState:
        batch, _, height, width = first.shape
        return first.new_zeros(batch, self.hidden, height, width), first.new_zeros(batch, 2, height, width)


class Encoder(nn.Module):
    """Maps frames (batch, 3, height, width) to features (batch, channels, height / factor, width / factor)."""

    def __init__(self, channels: int, factor: int) -> None:
        super().__init__()
        width = max(channels // 2, GROUPS) // GROUPS * GROUPS
        layers: list[nn.Module] = [_Reduce(3, width, 7)]
        while factor > 2:
            layers.append(_Reduce(width, width, 3))
            factor //= 2
        self.layers = nn.Sequential(*layers, _FrameBlock(width), nn.Conv2d(width, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Upsample(nn.Module):
    """Maps flows on the grid of the features to flows on the grid of the frames, in pixels of the frames.

    The flow of a pixel is a convex combination of the nine coarse flows around it, with weights from the hidden state.
    """

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self.factor = config.factor
        self.weights = nn.Sequential(
            nn.Conv2d(config.hidden, config.hidden, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(config.hidden, 9 * config.factor**2, 1),
        )

    def forward(self, z: FlowState) -> Tensor:
        h, flow = z
        batch, _, height, width = flow.shape
        weights = self.weights(h).view(batch, 1, 9, self.factor, self.factor, height, width).softmax(dim=2)
        near = F.unfold(self.factor * F.pad(flow, (1, 1, 1, 1), mode="replicate"), 3)
        fine = (weights * near.view(batch, 2, 9, 1, 1, height, width)).sum(dim=2)
        return fine.permute(0, 1, 4, 2, 5, 3).reshape(batch, 2, self.factor * height, self.factor * width)


class _Reduce(nn.Sequential):
    """A convolution of stride 2, a group norm and ReLU; it halves height and width."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        conv = nn.Conv2d(inputs, outputs, kernel, stride=2, padding=kernel // 2)
        super().__init__(conv, nn.GroupNorm(GROUPS, outputs), nn.ReLU())


class _FrameBlock(nn.Module):
    """relu(x + conv(relu(norm(conv(x))))), a residual block of the encoder."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(GROUPS, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.layers(x))
