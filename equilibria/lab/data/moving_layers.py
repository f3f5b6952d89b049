"""Generated scenes of textured layers under affine motions, with their exact optical flow and occlusions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from equilibria.lab.data.sets import Dataset, Split, generator

WAVES = 10  # number of plane waves in a texture
WAVELENGTHS = (5.0, 24.0)  # range of their wavelengths in pixels
RIPPLES = 3  # number of cosines in an outline
CHUNK = 32  # number of scenes that are drawn and rendered at once, which limits the memory


@dataclass(frozen=True, eq=False)
class Scenes:
    """n scenes of several layers; later layers are in front of earlier ones, and layer 0 covers the whole image.

    At time t the point u of a layer is at centre + t velocity + (I + t growth) u. Textures are sums of plane waves in u, so
    that colours are known between pixels too. Points are (x, y), in pixels from the centre of the first pixel.
    """

    centre: Tensor  # (n, layers, 2)
    velocity: Tensor  # (n, layers, 2)
    growth: Tensor  # (n, layers, 2, 2)
    radius: Tensor  # (n, layers), mean distance of the outline from the centre; infinite for the background
    ripples: Tensor  # (n, layers, RIPPLES, 2), cosine and sine parts of the outline, relative to the radius
    waves: Tensor  # (n, layers, WAVES, 2), radians per pixel
    phases: Tensor  # (n, layers, WAVES)
    colours: Tensor  # (n, layers, WAVES + 1, 3), the last one is the mean

    def render(self, points: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """Return the colours (n, ..., 3) in [0, 1] and the layer in front (n, ...) at points (n, ..., 2)."""
        flat = points.flatten(1, -2)
        u = self._inverse(flat, time)
        layer = self._front(u)
        values = (u @ self.waves.mT + self.phases.unsqueeze(2)).cos()
        textures = (values @ self.colours[..., :-1, :] + self.colours[..., -1:, :]).clamp(0, 1)  # (n, layers, p, 3)
        texture = textures.gather(1, layer[:, None, :, None].expand(-1, 1, -1, 3)).squeeze(1)
        return texture.view(*points.shape[:-1], 3), layer.view(points.shape[:-1])

    def flow(self, points: Tensor, time: float, later: float) -> tuple[Tensor, Tensor]:
        """Return the motion (n, ..., 2) of points seen at `time`, and a mask (n, ...) of those still in front at `later`."""
        flat = points.flatten(1, -2)
        u = self._inverse(flat, time)
        layer = self._front(u)
        seen = u.gather(1, layer[:, None, :, None].expand(-1, 1, -1, 2)).squeeze(1)
        moved = self._forward(seen, layer, later)
        in_front = self._front(self._inverse(moved, later)) == layer
        return (moved - flat).view(points.shape), in_front.view(points.shape[:-1])

    def _matrix(self, time: float) -> Tensor:
        return torch.eye(2, dtype=self.growth.dtype) + time * self.growth

    def _inverse(self, points: Tensor, time: float) -> Tensor:
        """Return points (n, p, 2) in the coordinates of every layer, (n, layers, p, 2)."""
        offset = points.unsqueeze(1) - (self.centre + time * self.velocity).unsqueeze(2)
        return offset @ torch.linalg.inv(self._matrix(time)).mT

    def _forward(self, u: Tensor, layer: Tensor, time: float) -> Tensor:
        """Return the pixels (n, p, 2) at `time` of points u, (n, p, 2), of the given layers, (n, p)."""
        rows = torch.arange(len(u)).unsqueeze(1)
        moved = (self._matrix(time)[rows, layer] @ u.unsqueeze(-1)).squeeze(-1)
        return (self.centre + time * self.velocity)[rows, layer] + moved

    def _front(self, u: Tensor) -> Tensor:
        """Return the last layer that covers each point, (n, p)."""
        # from 2 periods on: a ripple of one period would mainly shift the outline
        angle = torch.atan2(u[..., 1], u[..., 0]).unsqueeze(-1) * torch.arange(2, 2 + RIPPLES)
        waves = torch.stack([angle.cos(), angle.sin()], dim=-1) * self.ripples.unsqueeze(2)
        inside = u.norm(dim=-1) <= self.radius.unsqueeze(2) * (1 + waves.sum(dim=(-1, -2)))
        order = torch.arange(u.shape[1]).view(1, -1, 1)
        return torch.where(inside, order, 0).amax(dim=1)


def draw_scenes(
    n: int, size: tuple[int, int], layers: int, motion: float, draws: torch.Generator, dtype: torch.dtype = torch.float32
) -> Scenes:
    """Draw `n` scenes for frames of `size`.

    Centres move by at most `motion` pixels per unit of time, the background by half of that.
    """
    height, width = size

    def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(n, layers, *shape, generator=draws, dtype=dtype)

    heading, speed = uniform(high=2 * math.pi), motion * uniform().sqrt()  # velocities uniform in a disk
    speed[:, 0] /= 2
    radius = uniform(low=0.15, high=0.35) * min(size)
    radius[:, 0] = float("inf")
    turn, length = uniform(WAVES, high=2 * math.pi), uniform(WAVES, low=WAVELENGTHS[0], high=WAVELENGTHS[1])
    amplitude = uniform(WAVES, 3, low=-1.0) * 0.6 / math.sqrt(WAVES)
    return Scenes(
        centre=uniform(2, low=0.1, high=0.9) * torch.tensor([width, height], dtype=dtype),
        velocity=speed.unsqueeze(-1) * torch.stack([heading.cos(), heading.sin()], dim=-1),
        growth=uniform(2, 2, low=-1.0) * 0.3 * motion / max(size),
        radius=radius,
        ripples=uniform(RIPPLES, 2, low=-0.12, high=0.12),
        waves=2 * math.pi / length.unsqueeze(-1) * torch.stack([turn.cos(), turn.sin()], dim=-1),
        phases=uniform(WAVES, high=2 * math.pi),
        colours=torch.cat([amplitude, uniform(1, 3, low=0.25, high=0.75)], dim=2),
    )


def pixels(size: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the point (x, y) of every pixel, (height, width, 2)."""
    rows, columns = (torch.arange(length, dtype=dtype) for length in size)
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    return torch.stack([x, y], dim=-1)


def filmed(scenes: Scenes, size: tuple[int, int], frames: int) -> Split:
    """Render frames at times 0, 1, ... as bytes (n, frames, 3, height, width), with their targets.

    The target is (n, frames - 1, 3, height, width): the flow (x, y) from each frame to the next, and a mask that is 1 if the
    point is visible in the next frame too, and 0 if it is occluded or has left the frame.
    """
    points = pixels(size, scenes.centre.dtype).expand(len(scenes.centre), *size, 2)
    images = [scenes.render(points, float(t))[0] for t in range(frames)]
    targets = []
    for t in range(frames - 1):
        flow, in_front = scenes.flow(points, float(t), float(t + 1))
        ends = points + flow
        limits = torch.tensor([size[1] - 1, size[0] - 1], dtype=ends.dtype)
        visible = in_front & ((ends >= 0) & (ends <= limits)).all(dim=-1)
        targets.append(torch.cat([flow, visible.unsqueeze(-1).to(flow.dtype)], dim=-1))
    x = torch.stack(images, dim=1).mul(255).round().to(torch.uint8)
    return Split(x.movedim(-1, 2).contiguous(), torch.stack(targets, dim=1).movedim(-1, 2).contiguous())


@lru_cache(maxsize=4)
def moving_layers(
    *,
    size: tuple[int, int] = (48, 64),
    train: int = 1_000,
    valid: int = 0,
    test: int = 32,
    frames: int = 8,
    layers: int = 4,
    motion: float = 4.0,
    seed: int = 0,
) -> Dataset[Split]:
    """Generate scenes with their optical flow: pairs of frames for training, videos of `frames` frames for other splits.

    x is uint8 (n, frames, 3, height, width), y (n, frames - 1, 3, height, width) has the flow (x, y) in pixels from each
    frame to the next and a mask of the points that are seen in both. Layers move with constant velocity, turn, shear and
    grow, so that flows change slowly along a video.

    layers  number of layers, including the background
    motion  largest motion of the centre of a layer from frame to frame, in pixels
    """
    if min(size) < 8 or layers < 1 or frames < 2 or motion < 0:
        raise ValueError(
            "moving-layers needs frames of at least 8x8 pixels, one layer, two frames and a motion that is not negative, "
            f"got size={size}, layers={layers}, frames={frames}, motion={motion}."
        )

    def split(name: str, n: int, length: int) -> Split:
        draws = generator(seed, "moving layers", name)
        counts = [min(CHUNK, n - i) for i in range(0, n, CHUNK)]
        parts = [filmed(draw_scenes(count, size, layers, motion, draws), size, length) for count in counts]
        return Split(*(torch.cat([getattr(part, key) for part in parts]) for key in ("x", "y")))

    return Dataset(
        "moving-layers",
        split("train", train, 2),
        split("test", test, frames),
        split("valid", valid, frames) if valid else None,
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
    )
