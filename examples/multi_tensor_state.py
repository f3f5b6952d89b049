"""Solve a state of two tensors, an image and a vector that depend on each other, as one equilibrium.

python examples/multi_tensor_state.py
"""

import torch
from torch import Tensor, nn

import equilibria as eq

State = dict[str, Tensor]


class TwoStreams(nn.Module):
    """An image shifted by a vector, and the vector made from the mean of the image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.mix = nn.Linear(channels, channels)

    def forward(self, z: State, x: Tensor) -> State:
        image, vector = z["image"], z["vector"]
        shifted = torch.tanh(0.5 * self.conv(image) + vector[:, :, None, None] + x)
        return {"image": shifted, "vector": torch.tanh(0.5 * self.mix(image.mean(dim=(2, 3))))}


def start(x: Tensor) -> State:
    return {"image": torch.zeros_like(x), "vector": x.new_zeros(x.shape[:2])}


def main() -> None:
    torch.manual_seed(0)
    cell = TwoStreams(4)
    layer = eq.DEQ(cell, start, eq.Anderson(), eq.Stop(rtol=1e-6))
    x = torch.randn(3, 4, 8, 8)
    solution = layer.solve(x)
    again = cell(solution.z, x)
    for name, part in solution.z.items():
        print(f"{name}: {tuple(part.shape)}, |f(z) - z| at most {(again[name] - part).abs().max().item():.1e}")
    print(solution.stats)
    solution.z["vector"].sum().backward()
    gradient = cell.conv.weight.grad
    assert gradient is not None
    print(f"the vector's gradient reaches the convolution of the image: {gradient.norm().item():.3f}")


if __name__ == "__main__":
    main()
