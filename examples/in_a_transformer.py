"""A DEQ in place of the last block of a Hugging Face or timm model, or of a torch encoder if neither is installed.

python examples/in_a_transformer.py
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

import equilibria as eq


class BlockCell(nn.Module):
    """f(z, x) = norm(block(z) + x): a block of a stack as the cell of a DEQ."""

    def __init__(self, block: nn.Module, width: int) -> None:
        super().__init__()
        self.block, self.norm = block, nn.LayerNorm(width)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        out = self.block(z)
        return self.norm((out[0] if isinstance(out, tuple) else out) + x)


class InPlace(nn.Module):
    """A DEQ with the signature of the block that it replaces. Masks are ignored, because nothing is padded here."""

    def __init__(self, block: nn.Module, width: int) -> None:
        super().__init__()
        with torch.no_grad():
            self.in_a_tuple = isinstance(block(torch.zeros(1, 1, width)), tuple)
        self.deq = eq.DEQ(BlockCell(block, width), stop=eq.Stop(rtol=1e-3, max_steps=60))

    def forward(self, hidden: Tensor, *others: Any, **options: Any) -> Tensor | tuple[Tensor]:
        z = self.deq(hidden)
        return (z,) if self.in_a_tuple else z


class Encoder(nn.Module):
    """An encoder of torch, if neither transformers nor timm is installed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        for layer in self.layer:
            tokens = layer(tokens)
        return tokens


def small_encoder(width: int) -> tuple[nn.Module, nn.ModuleList | nn.Sequential]:
    """Return a model that maps vectors to vectors, and the list of its blocks."""
    if importlib.util.find_spec("transformers") is not None:
        from transformers import BertConfig
        from transformers.models.bert.modeling_bert import BertEncoder

        config = BertConfig(hidden_size=width, num_hidden_layers=2, num_attention_heads=4, intermediate_size=2 * width)
        config._attn_implementation = "eager"
        encoder = BertEncoder(config).eval()
        return encoder, encoder.layer
    if importlib.util.find_spec("timm") is not None:
        from timm.models.vision_transformer import Block

        blocks = nn.Sequential(Block(width, 4), Block(width, 4))
        return blocks, blocks
    encoder = Encoder(width)
    return encoder, encoder.layer


def main() -> None:
    torch.manual_seed(0)
    encoder, blocks = small_encoder(32)
    blocks[-1] = InPlace(blocks[-1], 32)
    with eq.record(encoder) as solutions:
        out = encoder(torch.randn(2, 7, 32))
        out = out if isinstance(out, Tensor) else out[0]
    out.square().mean().backward()
    print(f"{type(encoder).__module__}: output {tuple(out.shape)}")
    print(f"forward: {solutions[0].stats}\nbackward: {solutions[0].adjoint}")


if __name__ == "__main__":
    main()
