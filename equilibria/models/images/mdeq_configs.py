"""Configurations of multiscale DEQs, as released, with the published sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from equilibria._core.checks import require

Activation = Literal["relu", "gelu"]
LatentNorm = Literal["group", "batch"]


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """The differences between the two published implementations, apart from sizes.

    eager             an activation follows every norm, also inside a sum; False: inside a sum it follows the sum instead
    stem_bias         the convolutions of the stem have biases
    wide_bottleneck   the 3x3 convolution of a bottleneck maps h to 4h channels, and all norms are affine; False: it maps h
                      to h, and the norms of the body are not affine
    post_weight_norm  the layer after the fusion has weight norm, like the residual blocks
    final_step        the head gets f of the solver's answer; False: it gets the answer
    """

    activation: Activation
    eager: bool
    stem_bias: bool
    wide_bottleneck: bool
    post_weight_norm: bool
    final_step: bool


BAI = Conventions(
    activation="relu", eager=False, stem_bias=False, wide_bottleneck=False, post_weight_norm=True, final_step=False
)
PAL = Conventions(
    activation="gelu", eager=True, stem_bias=True, wide_bottleneck=True, post_weight_norm=False, final_step=True
)


@dataclass(frozen=True, kw_only=True)
class MDEQConfig:
    """Sizes of a multiscale DEQ; resolution i has channels[i] at 1 / 2^i of the first one's height and width.

    head               widths h of the classifier's bottlenecks, whose outputs have 4h channels; None: segmentation
    features           channels before the classifier's linear layer
    downsampling       how often the stem halves the image, 0 to 2
    expansion          factor of a residual block's channels between its two convolutions
    groups             groups of the group norm in the fusion; the layer after it has half as many
    block_groups       groups of the group norm in residual blocks; None: the same
    norm               norm of the cell; "batch" couples the samples of a batch in training
    post               norm of the layer after the fusion: "affine" or "plain"; None: there is no such layer
    dropout            share of a block's channels that is dropped; the mask stays the same throughout a solve
    tolerance          relative tolerance of the equilibrium and of its adjoint
    forward_steps      step limit of the solve; few of the published solves reach the tolerance before it
    backward_steps     step limit of the adjoint solve
    pretraining_depth  depth of the unrolled network that is trained first
    published          number of parameters as the paper prints it, rounded; None: it does not
    """

    summary: str
    channels: tuple[int, ...]
    head: tuple[int, ...] | None = None
    features: int = 200
    classes: int = 10
    inputs: int = 3
    downsampling: int = 0
    expansion: int = 5
    groups: int = 8
    block_groups: int | None = None
    norm: LatentNorm = "group"
    post: Literal["affine", "plain"] | None = "affine"
    dropout: float = 0.0
    conventions: Conventions = BAI
    tolerance: float = 1e-3
    forward_steps: int = 18
    backward_steps: int = 20
    pretraining_depth: int = 10
    published: int | None = None

    def __post_init__(self) -> None:
        require(len(self.channels) >= 1, "channels must name at least one resolution, got ().")
        require(0 <= self.downsampling <= 2, f"downsampling must be 0, 1 or 2 halvings, got {self.downsampling}.")
        require(self.norm in ("group", "batch"), f'norm must be "group" or "batch", got {self.norm!r}.')
        for groups in (self.groups, self.block_groups or self.groups):
            require(
                self.norm == "batch" or all(c % groups == 0 for c in self.channels),
                f"Group norm needs channels that divide into {groups} groups, got {self.channels}; choose other groups.",
            )
        require(
            self.head is None or len(self.head) == len(self.channels),
            f"head must have a width for each of the {len(self.channels)} resolutions, got {self.head}.",
        )

    def shapes(self, height: int, width: int) -> tuple[tuple[int, int, int], ...]:
        """Return (channels, height, width) of every resolution of an image's state."""
        return tuple((c, *halved((height, width), self.downsampling + i)) for i, c in enumerate(self.channels))

    def state_size(self, height: int, width: int) -> int:
        """Return the number of entries in an image's state."""
        return sum(c * h * w for c, h, w in self.shapes(height, width))


def halved(size: tuple[int, int], times: int) -> tuple[int, int]:
    """Return height and width after `times` convolutions of stride 2; odd sides are rounded up."""
    height, width = (-(-side // 2**times) for side in size)
    return height, width


# No released model has exactly the published number of parameters: they differ by up to 11 %, and the numbers of the two
# small ImageNet models seem to be swapped.

_FOUR = (32, 64, 128, 256)  # channels of the four resolutions

TINY = MDEQConfig(
    summary="CIFAR-10, two resolutions, code of 2020",
    channels=(24, 24),
    head=(8, 16),
    dropout=0.25,
    forward_steps=22,
    backward_steps=24,
    published=170_000,
)
LARGE = MDEQConfig(
    summary="CIFAR-10, four resolutions, code of 2020",
    channels=_FOUR,
    head=(14, 28, 56, 112),
    features=1680,
    dropout=0.3,
    published=10_000_000,
)
IMAGENET_SMALL = MDEQConfig(
    summary="ImageNet, small",
    channels=_FOUR,
    head=(24, 48, 96, 192),
    features=2048,
    classes=1000,
    downsampling=2,
    forward_steps=26,
    backward_steps=27,
    pretraining_depth=5,
    published=18_000_000,
)
IMAGENET_LARGE = replace(
    IMAGENET_SMALL,
    summary="ImageNet, large",
    channels=(80, 160, 320, 640),
    head=(32, 64, 128, 256),
    pretraining_depth=4,
    published=63_000_000,
)
IMAGENET_XL = replace(
    IMAGENET_LARGE, summary="ImageNet, extra large", channels=(88, 176, 352, 704), expansion=6, published=None
)
CITYSCAPES_SMALL = replace(
    IMAGENET_SMALL,
    summary="Cityscapes, small",
    head=None,
    classes=19,
    dropout=0.05,
    forward_steps=27,
    backward_steps=30,
    pretraining_depth=3,
    published=None,
)
SKIP_CIFAR = MDEQConfig(
    summary="CIFAR-10 or SVHN, Skip DEQ paper",
    channels=(24, 24),
    head=(8, 16),
    dropout=0.25,
    conventions=PAL,
    tolerance=0.05,
    forward_steps=20,
    backward_steps=15,
    published=171_000,
)
SKIP_MNIST = replace(
    SKIP_CIFAR,
    summary="MNIST, Skip DEQ paper",
    channels=(8, 16),
    inputs=1,
    block_groups=4,
    head=(8, 16),
    post=None,
    dropout=0.0,
    tolerance=0.01,
    forward_steps=50,
    published=84_000,
)

NANO = replace(
    TINY,
    summary="CIFAR-10 at 16x16, two resolutions, for a CPU",
    channels=(12, 12),
    head=(4, 8),
    features=64,
    groups=4,
    dropout=0.0,
    forward_steps=18,
    backward_steps=20,
    published=None,
)
SKIP_NANO = replace(
    SKIP_CIFAR,
    summary="CIFAR-10 or SVHN at 16x16, Skip DEQ paper, reduced",
    channels=(12, 12),
    head=(4, 8),
    features=64,
    groups=4,
    published=None,
)

MDEQ_CONFIGS: dict[str, MDEQConfig] = {
    "cifar-tiny": TINY,
    "cifar-tiny-2021": replace(
        TINY, summary="CIFAR-10, two resolutions, code of 2021", post="plain", forward_steps=18, backward_steps=20
    ),
    "cifar-large": LARGE,
    "cifar-large-2021": replace(LARGE, summary="CIFAR-10, four resolutions, code of 2021", post="plain"),
    # the widths that the paper prints; its released code has those of "cifar-large". They are not divisible by 8, hence
    # the 4 groups
    "cifar-regularized": replace(
        LARGE,
        summary="CIFAR-10, four resolutions, as printed in the paper on Jacobian regularization",
        channels=(28, 56, 112, 224),
        groups=4,
        post="plain",
        dropout=0.22,
        forward_steps=7,
        backward_steps=8,
        pretraining_depth=8,
    ),
    "imagenet-small": IMAGENET_SMALL,
    "imagenet-small-regularized": replace(
        IMAGENET_SMALL,
        summary="ImageNet, small, with Jacobian regularization",
        head=(28, 56, 112, 224),
        post="plain",
        dropout=0.02,
        forward_steps=14,
        backward_steps=14,
        published=17_000_000,
    ),
    "imagenet-large": IMAGENET_LARGE,
    "imagenet-large-regularized": replace(
        IMAGENET_LARGE,
        summary="ImageNet, large, with Jacobian regularization",
        post="plain",
        forward_steps=14,
        backward_steps=14,
        published=62_000_000,
    ),
    "imagenet-xl": IMAGENET_XL,
    "cityscapes-small": CITYSCAPES_SMALL,
    "cityscapes-xl": replace(
        CITYSCAPES_SMALL, summary="Cityscapes, extra large", channels=IMAGENET_XL.channels, expansion=6, dropout=0.04
    ),
    "nano": NANO,
    "nano-segmentation": replace(NANO, summary="CamVid at 72x96, two resolutions", head=None, classes=11, downsampling=1),
    "skip-mnist": SKIP_MNIST,
    "skip-cifar": SKIP_CIFAR,
    "skip-nano": SKIP_NANO,
}
