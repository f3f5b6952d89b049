"""Multiscale DEQs."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

import equilibria as eq
from equilibria.models.entries import parameters
from equilibria.models.images.mdeq import MDEQ, pretraining
from equilibria.models.images.mdeq_cell import MDEQCell
from equilibria.models.images.mdeq_configs import MDEQ_CONFIGS, PAL, MDEQConfig
from equilibria.models.images.mdeq_layers import ResidualBlock

VARIANTS = ("vanilla", "skip", "v2")
BATCH, CLASSES = 4, 8
SMALL = MDEQConfig(
    summary="for tests", channels=(4, 8), head=(2, 4), features=16, classes=CLASSES, expansion=2, groups=2, forward_steps=8
)
STYLES = {"bai": SMALL, "pal": replace(SMALL, conventions=PAL)}
SEGMENTER = replace(SMALL, channels=(4, 4, 8), head=None, downsampling=2)
# f(z) - z of a float32 image of 8x8 pixels is known to a few 1e-6 of z
TIGHT = eq.Stop(rtol=1e-5, atol=0.0, max_steps=80, on_failure="raise")
AGREEMENT = 1e-3  # of two ways to an equilibrium at that tolerance, with the norms behind it


def images(batch: int = BATCH, size: int = 8) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


def small(config: MDEQConfig = SMALL, **options: Any) -> MDEQ:
    """Return a model whose cell contracts; norms undo a change of scale, so the outputs of blocks are shifted instead.

    A norm amplifies what varies if the constants of its channels are nearly equal by chance. Such draws are repeated.
    """
    for draw in range(100):
        torch.manual_seed(1000 * draw)
        model = MDEQ(config, **options)
        with torch.no_grad():
            for block in cell_of(model).blocks:
                block.norm3.weight.mul_(0.1)
                block.norm3.bias.normal_()
        if contracts(model):
            return model
    raise AssertionError("none of 100 draws contracts")


def contracts(model: MDEQ) -> bool:
    """Return True if plain iteration converges quickly, from zeros and from another start."""
    cell, x = copy.deepcopy(cell_of(model)).eval(), copy.deepcopy(model.stem).eval()(images())
    first = [torch.zeros(len(x), *shape) for shape in model.config.shapes(*images().shape[2:])]
    for z in (tuple(first), tuple(torch.ones_like(part) for part in first)):
        with torch.no_grad():
            for _ in range(20):
                before, z = z, cell(z, x)
        if any(float((a - b).norm()) > 1e-3 * float(b.norm()) for a, b in zip(before, z, strict=True)):
            return False
    return True


def cell_of(model: MDEQ) -> Any:
    return model.layer.cell


def solved(model: nn.Module, x: Tensor) -> tuple[Tensor, Any, eq.Solution]:
    with eq.record(model) as solutions:
        scores, z = model(x, with_state=True)
    return scores, z, solutions[0]


def count(config: MDEQConfig, **options: Any) -> int:
    with torch.device("meta"):
        return parameters(MDEQ(config, **options))


# sizes

RELEASED = {
    "cifar-tiny": 158_986,
    "cifar-tiny-2021": 158_890,
    "cifar-large": 11_098_398,
    "cifar-large-2021": 11_097_438,
    "cifar-regularized": 9_029_926,
    "imagenet-small": 16_808_936,
    "imagenet-small-regularized": 18_613_496,
    "imagenet-large": 67_063_624,
    "imagenet-large-regularized": 67_061_224,
    "imagenet-xl": 90_463_280,
    "cityscapes-small": 8_968_467,
    "cityscapes-xl": 79_551_755,
    "skip-mnist": 84_202,
    "skip-cifar": 171_898,
}
OURS = {"nano": 39_366, "nano-segmentation": 31_007, "skip-nano": 42_702}  # small ones that nobody published
PUBLISHED = {
    "cifar-tiny": 170_000,
    "cifar-tiny-2021": 170_000,
    "cifar-large": 10_000_000,
    "cifar-large-2021": 10_000_000,
    "cifar-regularized": 10_000_000,
    "imagenet-small": 18_000_000,
    "imagenet-small-regularized": 17_000_000,
    "imagenet-large": 63_000_000,
    "imagenet-large-regularized": 62_000_000,
    "imagenet-xl": None,
    "cityscapes-small": None,
    "cityscapes-xl": None,
    "skip-mnist": 84_000,
    "skip-cifar": 171_000,
}


def test_every_configuration_has_its_count() -> None:
    assert set(RELEASED) == set(PUBLISHED) == set(MDEQ_CONFIGS) - set(OURS)
    assert {name: count(MDEQ_CONFIGS[name]) for name in OURS} == OURS


@pytest.mark.parametrize("name", RELEASED)
def test_parameters_are_those_of_the_released_configurations(name: str) -> None:
    assert count(MDEQ_CONFIGS[name]) == RELEASED[name]
    assert count(MDEQ_CONFIGS[name], variant="v2") == count(MDEQ_CONFIGS[name], depth=3) == RELEASED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_are_kept_and_lie_within_11_percent(name: str) -> None:
    published = MDEQ_CONFIGS[name].published
    assert published == PUBLISHED[name]
    assert published is None or abs(RELEASED[name] / published - 1) < 0.11


@pytest.mark.parametrize(("name", "with_predictor"), [("skip-mnist", 91_306), ("skip-cifar", 229_450)])
def test_a_predictor_adds_the_published_number_of_parameters(name: str, with_predictor: int) -> None:
    assert count(MDEQ_CONFIGS[name], variant="skip") == with_predictor


@pytest.mark.parametrize(("name", "millions"), [("cifar-tiny", 0.1118), ("cifar-large", 8.72)])
def test_the_cell_alone_has_its_published_size(name: str, millions: float) -> None:
    with torch.device("meta"):
        assert parameters(MDEQCell(MDEQ_CONFIGS[name])) / 1e6 == pytest.approx(millions, abs=0.004)


@pytest.mark.parametrize(
    ("name", "side", "size"),
    [
        ("cifar-tiny", 32, 30_720),
        ("cifar-large", 32, 61_440),
        ("imagenet-small", 224, 188_160),
        ("skip-mnist", 28, 9_408),
    ],
)
def test_states_have_the_published_size(name: str, side: int, size: int) -> None:
    assert MDEQ_CONFIGS[name].state_size(side, side) == size


# the cell


def by_hand(cell: Any, z: tuple[Tensor, Tensor], x: Tensor, config: MDEQConfig) -> tuple[Tensor, Tensor]:
    """Return f(z, x) of two resolutions by the formula."""
    eager = config.conventions.eager
    act = F.gelu if eager else F.relu

    def block(b: Any, z: Tensor, x: Tensor | float) -> Tensor:
        a = act(b.norm1(F.conv2d(z, b.conv1.weight, padding=1)))
        y = b.norm2(F.conv2d(a, b.conv2.weight, padding=1) + x)
        return b.norm3(act((act(y) if eager else y) + z))

    high, low = block(cell.blocks[0], z[0], x), block(cell.blocks[1], z[1], 0.0)
    (_, up), (down, _) = cell.paths
    lowered = down[1](F.conv2d(high, down[0].weight, stride=2, padding=1))
    raised = up[1](F.conv2d(low, up[0].weight))
    if eager:
        lowered, raised = act(lowered), act(raised)
    sums = high + raised.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3), low + lowered
    first, second = (post[2](F.conv2d(act(y), post[1].weight)) for post, y in zip(cell.posts, sums, strict=True))
    return first, second


@pytest.mark.parametrize("style", STYLES)
def test_the_cell_follows_the_formula(style: str) -> None:
    cell, x = MDEQCell(STYLES[style]), torch.randn(2, 4, 6, 6)
    z = torch.randn(2, 4, 6, 6), torch.randn(2, 8, 3, 3)
    torch.testing.assert_close(cell(z, x), by_hand(cell, z, x, STYLES[style]))


def test_without_a_layer_after_fusion_the_sum_is_the_state() -> None:
    config = replace(STYLES["pal"], post=None)
    cell, x = MDEQCell(config), torch.randn(2, 4, 6, 6)
    assert [type(post) for post in cell.posts] == [nn.Identity, nn.Identity]
    assert [tuple(part.shape) for part in cell((x, torch.randn(2, 8, 3, 3)), x)] == [(2, 4, 6, 6), (2, 8, 3, 3)]


@pytest.mark.parametrize("style", STYLES)
def test_weight_norm_is_on_blocks_and_posts_but_not_on_paths(style: str) -> None:
    cell: Any = MDEQCell(STYLES[style])
    assert all(is_parametrized(conv, "weight") for block in cell.blocks for conv in (block.conv1, block.conv2))
    assert [is_parametrized(post[1], "weight") for post in cell.posts] == [style == "bai"] * 2
    assert not any(is_parametrized(module) for module in cell.paths.modules())


def test_norms_of_the_cell_have_the_groups_of_their_place() -> None:
    with torch.device("meta"):
        cell: Any = MDEQCell(replace(MDEQ_CONFIGS["skip-mnist"], post="plain"))
    assert [block.norm1.num_groups for block in cell.blocks] == [4, 4]
    assert (cell.paths[0][1][1].num_groups, cell.paths[1][0][1].num_groups) == (8, 8)
    assert [(post[2].num_groups, post[2].affine) for post in cell.posts] == [(4, False)] * 2


def test_convolutions_begin_small() -> None:
    torch.manual_seed(0)
    model: Any = MDEQ(MDEQ_CONFIGS["skip-mnist"])
    for conv in (module for module in model.modules() if isinstance(module, nn.Conv2d)):
        assert float(conv.weight.detach().square().mean().sqrt()) == pytest.approx(0.01, rel=0.3)
        assert conv.bias is None or conv.bias.detach().abs().max() < 0.05


def test_odd_sides_are_rounded_up() -> None:
    config = replace(SMALL, channels=(4, 4, 8, 8), head=(1, 1, 2, 2))
    _, z, _ = solved(small(config), torch.randn(2, 3, 9, 7))
    assert tuple(tuple(part.shape[1:]) for part in z) == config.shapes(9, 7) == ((4, 9, 7), (4, 5, 4), (8, 3, 2), (8, 2, 1))


# the model


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_head_sees_an_equilibrium_found_from_the_variant_s_start(variant: Any, style: str) -> None:
    model = small(STYLES[style], variant=variant, stop=TIGHT).eval()
    scores, z, s = solved(model, images())
    assert scores.shape == (BATCH, CLASSES)
    x = model.stem(images())
    torch.testing.assert_close(z, cell_of(model)(s.z, x) if style == "pal" else s.z)
    torch.testing.assert_close(cell_of(model)(z, x), z, rtol=AGREEMENT, atol=AGREEMENT)
    zeros = tuple(torch.zeros_like(part) for part in z)
    predictor: Any = model.layer.init
    start = predictor(x) if variant == "skip" else cell_of(model)(zeros, x) if variant == "v2" else zeros
    torch.testing.assert_close(s.z0, start)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_penalties_reach_every_parameter(variant: Any, style: str) -> None:
    model = small(STYLES[style], variant=variant)
    scores, _, s = solved(model, images())
    (F.cross_entropy(scores, torch.arange(BATCH)) + eq.skip_penalty(s) + eq.jacobian_penalty(s)).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() and p.grad.any() for p in model.parameters())


def test_every_sample_has_its_own_statistics() -> None:
    model = small(stop=TIGHT).eval()
    x = images() * torch.tensor([0.01, 1.0, 3.0, 30.0]).view(-1, 1, 1, 1)
    together, _, s = solved(model, x)
    assert s.stats.status.shape == s.stats.steps.shape == s.stats.residual.shape == (BATCH,)
    assert s.stats.converged.all() and (s.stats.residual <= TIGHT.rtol).all()
    for i in range(BATCH):
        alone, _, own = solved(model, x[i : i + 1])
        # a convolution sums in another order for another batch, and the last residual may lie on either side
        assert abs(int(own.stats.steps) - int(s.stats.steps[i])) <= 1
        torch.testing.assert_close(alone, together[i : i + 1], rtol=AGREEMENT, atol=AGREEMENT)


def test_a_batch_can_be_one_system() -> None:
    assert solved(small(batched=False), images())[2].stats.status.shape == (1,)


def test_solver_stop_and_gradient_are_passed_on() -> None:
    parts: dict[str, Any] = {"solver": eq.Anderson(), "stop": TIGHT, "gradient": eq.JFB(), "eval_stop": eq.Stop()}
    layer: Any = small(**parts).layer
    assert {name: getattr(layer, name) for name in parts} == parts
    default: Any = MDEQ(SMALL).layer
    assert default.solver == eq.Anderson()
    assert (default.stop.max_steps, default.gradient.stop.max_steps) == (SMALL.forward_steps, SMALL.backward_steps)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_fits_one_batch(variant: Any) -> None:
    model = small(variant=variant)
    x, y = images(8), torch.arange(8)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    for _ in range(25):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.5


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_state_dict_restores_the_model(variant: Any) -> None:
    model = small(variant=variant)
    model(images())  # moves running statistics
    other = MDEQ(SMALL, variant=variant)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other.eval()(images()), model.eval()(images()))


def test_a_predictor_gives_every_resolution() -> None:
    config = replace(SMALL, channels=(4, 8, 8), head=(2, 2, 4))
    _, z, s = solved(small(config, variant="skip"), images())
    assert [part.shape for part in s.z0] == [part.shape for part in z]
    predictor: Any = small(config, variant="skip").layer.init
    assert isinstance(predictor.block, ResidualBlock) and predictor.block.dropout.p == 0


def test_a_mask_is_fixed_within_a_solve_and_drops_whole_channels() -> None:
    model = small(replace(SMALL, dropout=0.5), stop=replace(TIGHT, compact=False))
    dropout: Any = cell_of(model).blocks[1].dropout
    masks: list[Tensor] = []
    handle = dropout.register_forward_hook(lambda module, *_: masks.append(module.mask))
    solved(model, images())[0].sum().backward()
    handle.remove()
    masks = [mask for mask in masks if len(mask) == BATCH]  # the adjoint goes on without samples that are done
    assert len(masks) > 3 and all(torch.equal(mask, masks[0]) for mask in masks)
    assert masks[0].shape == (BATCH, 8, 1, 1) and set(masks[0].unique().tolist()) == {0.0, 2.0}
    torch.manual_seed(5)
    first = model(images())
    assert not torch.equal(first, model(images()))
    model.eval()
    assert torch.equal(model(images()), model(images()))


def test_latent_batch_norm_moves_its_statistics_once_per_solve() -> None:
    model = small(replace(SMALL, norm="batch"))
    scores = model(images())
    scores.square().sum().backward()
    assert int(cell_of(model).blocks[0].norm1.num_batches_tracked) == 1
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    assert count(replace(SMALL, norm="batch")) == count(SMALL)


def test_segmentation_scores_every_place_of_the_highest_resolution() -> None:
    model = small(SEGMENTER)
    scores = model(images(2, size=32))
    assert scores.shape == (2, CLASSES, 8, 8)
    F.cross_entropy(scores, torch.zeros(2, 8, 8, dtype=torch.int64)).backward()
    assert all(p.grad is not None for p in model.parameters())


# explicit networks


@pytest.mark.parametrize("style", STYLES)
def test_the_explicit_twin_shares_its_weights_and_reaches_the_same_state(style: str) -> None:
    model = small(STYLES[style], stop=TIGHT).eval()
    twin = MDEQ(STYLES[style], depth=80).eval()
    twin.load_state_dict(model.state_dict())
    assert parameters(twin) == parameters(model)
    torch.testing.assert_close(twin(images()), model(images()), rtol=AGREEMENT, atol=AGREEMENT)


@pytest.mark.parametrize("style", STYLES)
def test_pretraining_is_the_explicit_network_of_that_depth(style: str) -> None:
    model, twin = small(STYLES[style]), small(STYLES[style], depth=3)
    before = model.layer.gradient
    pretraining(model, depth=3)
    scores, _, s = solved(model, images())
    torch.testing.assert_close(scores, twin(images()))
    assert (s.stats.steps == 3).all()
    scores.square().sum().backward()
    twin(images()).square().sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-4)
    pretraining(nn.Sequential(model), on=True)
    assert model.layer.gradient == eq.Unrolled(depth=SMALL.pretraining_depth)
    pretraining(model, on=False)
    assert model.layer.gradient is before


# errors


def test_invalid_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="variant must be one of vanilla, skip, v2, got 'v3'"):
        MDEQ(SMALL, variant="v3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"divide into 8 groups, got \(28, 56, 112, 224\)"):
        replace(MDEQ_CONFIGS["cifar-regularized"], groups=8)
    with pytest.raises(ValueError, match=r"a width for each of the 2 resolutions, got \(8,\)"):
        replace(SMALL, head=(8,))
    with pytest.raises(ValueError, match="downsampling must be 0, 1 or 2 halvings, got 3"):
        replace(SMALL, downsampling=3)
    with pytest.raises(ValueError, match='norm must be "group" or "batch", got \'layer\''):
        replace(SMALL, norm="layer")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one resolution"):
        replace(SMALL, channels=(), head=())


def test_pretraining_needs_an_equilibrium() -> None:
    with pytest.raises(ValueError, match="this Linear contains none"):
        pretraining(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="this MDEQ is an explicit network"):
        pretraining(small(depth=2))
