"""Language modelling: memory from segment to segment, perplexity over a split, and further measurements."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("lightning_fabric")
from equilibria.deq import DEQ
from equilibria.lab.errors import SettingError
from equilibria.lab.experiments.deq_language.data import TOY_WORDS, Segments, TextData, TextSegment, toy_text
from equilibria.lab.experiments.deq_language.measurements import changes, peak_bytes, peak_over_depths, stopped, with_memory
from equilibria.lab.experiments.deq_language.models import LanguageModel
from equilibria.lab.experiments.deq_language.table import ptb
from equilibria.lab.experiments.deq_language.task import Language, LanguageSettings
from equilibria.lab.training.settings import Optimizer, Training
from equilibria.lab.training.statistics import Meter, observe
from equilibria.lab.training.trainer import Trainer
from equilibria.models.language.deq_transformer import DEQTransformer
from equilibria.models.language.sequence import Memory
from equilibria.solution import record
from tests.models.learning import with_large_weights

SMALL = LanguageModel(width=8, heads=2, inner=8, memory=8, forward_steps=10, backward_steps=10)
TRELLIS = LanguageModel(kind="trellis", embedding=4, hidden=4, forward_steps=10, backward_steps=10, solver="anderson")
FEW = Training(batch_size=2, eval_batch_size=2)
DATA = TextData(name="toy", train=121, valid=101, test=101, length=10)


def settings(**changes: Any) -> LanguageSettings:
    return dataclasses.replace(LanguageSettings(data=DATA, model=SMALL), **changes)


def begun(chosen: LanguageSettings | None = None) -> tuple[Language, Any, Any]:
    """Return a task, its model and its batches."""
    torch.manual_seed(0)
    task = Language(chosen or settings())
    task.prepare(None, FEW)
    return task, task.model(), task.batches(None, FEW, 0, 1)


def losses(task: Language, model: Any, segments: Segments) -> list[Tensor]:
    return [task.loss(model, segment, step).loss.detach() for step, segment in enumerate(segments)]


# data


def test_segments_have_their_split_and_position() -> None:
    segments = Segments("valid", torch.arange(50), 2, 4)
    found = list(segments)
    assert [s.position for s in found] == list(range(6)) and {s.split for s in found} == {"valid"}
    assert [s.position for s in found if s.look] == [4]
    assert torch.equal(found[0].x, torch.tensor([[0, 1, 2, 3], [24, 25, 26, 27]])) and torch.equal(
        found[0].y, found[0].x + 1
    )
    assert [s.look for s in Segments("valid", torch.arange(9), 2, 4)] == [True]


@pytest.mark.parametrize("level", ["word", "character"])
def test_the_toy_text_needs_no_files(level: Any) -> None:
    data = TextData(name="toy", level=level)
    found = data.load(None)
    assert len(found.classes) == data.vocabulary
    assert int(found.train.max()) < data.vocabulary and int(found.train.min()) >= 0
    assert torch.equal(found.train, toy_text(level).train)


def test_the_requested_part_of_a_text_is_used() -> None:
    assert {name: len(tokens) for name, tokens in DATA.splits(None).items()} == {"train": 121, "valid": 101, "test": 101}
    with pytest.raises(ValueError, match="tokens of toy, got"):
        TextData(name="toy", train=10**6).splits(None)
    with pytest.raises(ValueError, match=r"data\.length is a number of tokens and must be at least 1, got 0"):
        TextData(length=0)
    with pytest.raises(ValueError, match=r"Count them and set data\.tokens"):
        _ = TextData(name="wikitext-103", level="character").vocabulary


def test_a_text_with_more_words_than_the_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ptb").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "ptb" / f"ptb.{split}.txt").write_text("a b c d\n")
    assert TextData(name="ptb", tokens=5).load(tmp_path).classes == ("a", "b", "c", "d", "<eos>")
    with pytest.raises(ValueError, match=r"has 5 tokens, but the model is made for 4\. Set data\.tokens=5"):
        TextData(name="ptb", tokens=4).load(tmp_path)


def test_vocabularies_are_known_without_the_files() -> None:
    words = {name: TextData(name=name).vocabulary for name in ("toy", "ptb", "wikitext-2", "wikitext-103")}
    assert words == {"toy": len(TOY_WORDS), "ptb": 10_000, "wikitext-2": 33_278, "wikitext-103": 267_735}
    assert TextData(name="ptb", level="character").vocabulary == 50


# the loss and its memory


def test_perplexity_is_the_exponential_of_the_mean_over_the_whole_split() -> None:
    """With enough memory, segments of an equilibrium give the result of one long segment; the last segment is shorter."""
    model = dataclasses.replace(SMALL, memory=200, tolerance=1e-9, forward_steps=100)
    task, net, _ = begun(settings(model=model, data=dataclasses.replace(DATA, length=9)))
    net = with_large_weights(net).eval()
    tokens = DATA.splits(None)["valid"]
    meter = Meter()
    for segment in Segments("valid", tokens, 2, 9):
        meter.add_batch(observe(task.evaluate(net, segment), []))
    whole = Segments("test", tokens, 2, 50).batch(0, 0)
    with torch.no_grad():
        expected, _ = net(whole.x, None, whole.y)
    found = task.summarise(meter.means())
    assert found["nll"] == pytest.approx(float(expected), rel=1e-7)
    assert found["perplexity"] == pytest.approx(math.exp(float(expected)), rel=1e-7)
    assert found["bits"] == pytest.approx(float(expected) / math.log(2), rel=1e-7)


def test_summaries_cover_variants_and_infinite_perplexity() -> None:
    task = Language(settings())
    found = task.summarise({"nll": 1.0, "nll_at_2": 2.0, "loss": 5.0})
    assert found["perplexity_at_2"] == pytest.approx(math.exp(2)) and found["loss"] == 5.0
    assert task.summarise({"nll": 1e4})["perplexity"] == math.inf
    assert task.summarise({}) == {}


def test_every_split_has_its_own_memory_that_begins_empty() -> None:
    task, model, loaders = begun()
    alone = losses(task, model, loaders.train)
    again, other, batches = begun()
    seen = []
    for step, segment in enumerate(batches.train):
        seen.append(again.loss(other, segment, step).loss.detach())
        other.eval()
        for split in (batches.valid, batches.test):
            again.evaluate(other, split.batch(0, min(step, len(split) - 1)))
        other.train()
    assert torch.equal(torch.stack(alone), torch.stack(seen))
    assert torch.equal(torch.stack(alone), torch.stack(losses(again, other, batches.train)))  # the next epoch
    without, _ = model(loaders.train.batch(0, 3).x, None, loaders.train.batch(0, 3).y)
    assert not torch.allclose(alone[3], without, atol=1e-7)


@pytest.mark.parametrize("model", [SMALL, TRELLIS, LanguageModel(kind="gru", size="6")], ids=lambda m: m.kind)
def test_the_memory_goes_through_state_and_resume(model: LanguageModel) -> None:
    task, net, loaders = begun(settings(model=model))
    batches = [loaders.train.batch(0, i) for i in range(3)]
    for step in (0, 1):
        task.loss(net, batches[step], step)
    other, _, _ = begun(settings(model=model))
    other.resume(task.state())
    assert torch.equal(other.loss(net, batches[2], 2).loss, task.loss(net, batches[2], 2).loss)


def test_a_memory_that_is_not_finite_is_dropped() -> None:
    task, net, loaders = begun()
    task._keep("train", (torch.tensor([[1.0, math.nan]]),))
    assert task.state()["memory"] == []
    assert torch.isfinite(task.loss(net, loaders.train.batch(0, 1), 1).loss)


def test_penalty_and_steps_follow_their_schedules() -> None:
    chosen = settings(jacobian_weight=0.5, jacobian_frequency=1.0, jacobian_increment=0.25, jacobian_every=3, jitter=2)
    task, net, loaders = begun(chosen)
    task.prepare(None, dataclasses.replace(FEW, pretrain_steps=2))
    assert [task._jacobian(step) for step in (1, 2, 4, 5, 8)] == [0.0, 0.5, 0.5, 0.75, 1.0]
    segment = loaders.train.batch(0, 0)
    limits = set()
    for step in range(2, 20):
        outcome = task.loss(net, segment, step)
        limits.add(net.layer.stop.max_steps)
    assert limits == {8, 9, 10} and net.layer.eval_stop.max_steps == 10
    metrics = outcome.metrics
    weight = task._jacobian(19)
    assert float(outcome.loss.detach()) == pytest.approx(
        float(metrics["nll"]) + weight * float(metrics["jacobian"]), rel=1e-5
    )
    task.pretrain(net, True)
    assert "jacobian" not in task.loss(net, segment, 3).metrics


def test_trellisnet_is_trained_with_auxiliary_losses_and_activation_penalties() -> None:
    model = dataclasses.replace(TRELLIS, size="word-ptb", depth=13)
    task, net, loaders = begun(settings(model=model, activation=(2.0, 1.0)))
    segment = loaders.train.batch(0, 0)
    net.eval()  # without masks
    parts, _ = net(segment.x, None, segment.y, with_parts=True)
    outcome = task.loss(net, segment, 0)
    penalty = 2 * parts.output.square().mean() + parts.output.diff(dim=1).square().mean()
    expected = parts.loss + 0.05 * parts.auxiliary + penalty
    torch.testing.assert_close(outcome.loss, expected)
    assert float(parts.auxiliary.detach()) > 0
    torch.testing.assert_close(outcome.metrics["nll"], parts.loss.detach())


# what is measured beside


def test_measuring_peak_memory_has_no_side_effects() -> None:
    chosen = settings(model=dataclasses.replace(SMALL, dropout=0.2), memory_depths=(3,))
    task, net, loaders = begun(chosen)
    segment = next(s for s in (loaders.train.batch(0, i) for i in range(6)) if s.look)
    torch.manual_seed(1)
    with record(net) as solutions:
        outcome = task.loss(net, segment, 4)
    after = torch.rand(3)
    plain, other, _ = begun(chosen)
    torch.manual_seed(1)
    expected = plain.loss(other, segment._replace(look=False), 4)
    assert torch.equal(after, torch.rand(3)) and torch.equal(outcome.loss, expected.loss)
    assert len(solutions) == 1 and all(weight.grad is None for weight in net.parameters())
    found = outcome.metrics
    assert found["peak_bytes_layer"] > 0 and found["peak_bytes_step"] > 0 and found["peak_bytes_3"] > 0
    inner = sum(weight.numel() for name, weight in net.named_parameters() if not name.startswith("vocabulary"))
    assert found["inner_parameters"] == inner and "peak_bytes_step" not in expected.metrics


def test_the_memory_of_a_layer_excludes_the_softmax() -> None:
    peaks = {}
    for tokens in (50, 5_000):
        task, net, loaders = begun(settings(data=dataclasses.replace(DATA, tokens=tokens)))
        segment = loaders.train.batch(0, 0)

        def loss(twin: Any, task: Language = task, segment: TextSegment = segment) -> Tensor:
            return task._judged(twin, segment, (), 0.0)[0]

        peaks[tokens] = [peak_bytes(net, segment, loss, headless=headless) for headless in (False, True)]
    scores = 20 * 5_000 * 4  # of 2 rows of 10 places, in bytes
    assert peaks[5_000][0] > peaks[50][0] + scores
    assert peaks[5_000][1] < 1.1 * peaks[50][1]


def test_memory_over_depth_is_constant_for_equilibria_and_grows_for_stacks() -> None:
    peaks = {}
    for name, model in {
        # as the table has it: left to itself GMRES keeps 4 to 20 directions, more where steps are slow, and how slow they
        # are below what the dtype resolves is a matter of rounding
        "deq": dataclasses.replace(SMALL, solver="picard", directions=4),
        "tied": dataclasses.replace(SMALL, depth=2),
        "sqrt": dataclasses.replace(SMALL, depth=2, checkpoint="sqrt"),
        "trellis": dataclasses.replace(TRELLIS, depth=2),
    }.items():
        task, net, loaders = begun(settings(model=model))
        segment = loaders.train.batch(0, 0)

        def loss(twin: Any, task: Language = task, segment: TextSegment = segment) -> Tensor:
            return task._judged(twin, segment, (), 0.0)[0]

        peaks[name] = peak_over_depths(net, segment, loss, (4, 12, 24))
    assert peaks["deq"][24] <= 1.05 * peaks["deq"][4] and peaks["deq"][12] <= 1.05 * peaks["deq"][4]
    assert peaks["tied"][12] > 2 * peaks["tied"][4] and peaks["trellis"][12] > 2 * peaks["trellis"][4]
    assert peaks["sqrt"][12] < 0.8 * peaks["tied"][12]


@pytest.mark.parametrize("model", [SMALL, dataclasses.replace(SMALL, depth=3), TRELLIS], ids=["deq", "tied", "trellis"])
def test_changes_are_those_of_plain_iteration(model: LanguageModel) -> None:
    _, net, loaders = begun(settings(model=model))
    net = net.double().eval()
    segment = loaders.train.batch(0, 0)
    memory: Memory = net(segment.x, None, segment.y)[1]
    found = changes(net, segment, memory, (1, 3))
    with torch.no_grad():
        x = net.vocabulary.embed(segment.x)
        cell: Any = net.layer.cell
        if isinstance(net, DEQTransformer):
            given = cell.prepare(net.injection(x), memory)
            states: list[Any] = [(torch.zeros_like(x),)]
            for _ in range(3):
                states.append((cell(states[-1][0], *given),))
        else:
            zeros = x.new_zeros(*x.shape[:2], 8)
            given = cell.prepare(x, memory)
            states = [(zeros, zeros)]
            for _ in range(3):
                states.append(cell(states[-1], *given))
    flat = [torch.cat([part.flatten(1) for part in state], dim=1) for state in states]
    for depth, value in found.items():
        expected = ((flat[depth] - flat[depth - 1]).norm(dim=1) / flat[depth].norm(dim=1)).mean()
        assert value == pytest.approx(float(expected), rel=1e-9)


def test_perplexity_is_measured_with_other_limits_on_the_same_weights() -> None:
    task, net, loaders = begun(settings(at=(1, 10), memories=(0, 8)))
    net = with_large_weights(net).eval()
    for i in range(2):
        with record(net) as solutions:
            found: dict[str, Any] = dict(task.evaluate(net, loaders.valid.batch(0, i)).metrics)
        assert len(solutions) == 1  # those of the variants are not the model's
    torch.testing.assert_close(found["nll_at_10"], found["nll"])
    torch.testing.assert_close(found["nll_memory_8"], found["nll"])
    assert not torch.allclose(found["nll_at_1"], found["nll"]) and not torch.allclose(found["nll_memory_0"], found["nll"])
    segment = loaders.valid.batch(0, 1)
    without, _ = net(segment.x, None, segment.y)
    torch.testing.assert_close(found["nll_memory_0"], without.detach())
    assert net.layer.eval_stop.max_steps == 10 and net.config.eval_memory is None
    explicit = begun(settings(model=TRELLIS))[1]
    assert with_memory(explicit, 3) is None and stopped(explicit, 2) is not None
    assert stopped(begun(settings(model=dataclasses.replace(SMALL, depth=2)))[1], 2) is None


# models and settings


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"size": "huge"}, "size of transformer must be one of medium"),
        ({"kind": "gru", "size": "nano"}, "The size of a gru is its number of units"),
        ({"checkpoint": "sqrt"}, "pass a depth as well"),
    ],
)
def test_unknown_models_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        LanguageModel(**options)


def test_heads_must_divide_the_width() -> None:
    assert LanguageModel(width=24, heads=3).transformer(10).head_width == 8
    with pytest.raises(ValueError, match="width must be divisible by heads, got width=24 and heads=5"):
        LanguageModel(width=24, heads=5).transformer(10)


def test_cutoffs_beyond_the_vocabulary_are_left_out() -> None:
    for model in (SMALL, TRELLIS):
        net = dataclasses.replace(model, cutoffs=(5, 900)).model(20)
        assert net.vocabulary.config.cutoffs == (5,)  # type: ignore[union-attr]


@pytest.mark.parametrize("gradient", ["implicit", "upg", "npg", "jfb"])
def test_every_gradient_trains(gradient: Any) -> None:
    task, net, loaders = begun(settings(model=dataclasses.replace(SMALL, gradient=gradient)))
    outcome = task.loss(net, loaders.train.batch(0, 0), 0)
    outcome.loss.backward()
    assert all(weight.grad is not None and torch.isfinite(weight.grad).all() for weight in net.parameters())


def test_the_published_adjoint_takes_all_its_steps() -> None:
    backward = {}
    for adjoint in ("gmres", "broyden"):
        # not so many that Broyden's method arrives at the last bit, from where nothing is left to do
        model = dataclasses.replace(SMALL, adjoint=adjoint, backward_steps=15)
        task, net, loaders = begun(settings(model=model))
        net = with_large_weights(net)
        with record(net) as solutions:
            task.loss(net, loaders.train.batch(0, 0), 0).loss.backward()
        assert solutions[0].adjoint is not None
        backward[adjoint] = solutions[0].adjoint.evaluations
    assert backward["gmres"] < 15 == backward["broyden"]


def test_a_model_learns_the_toy_text(tmp_path: Path) -> None:
    """The perplexity approaches its optimum: six of eight words are free, with 4, 6, 8, 5, 6 and 8 choices."""
    model = LanguageModel(width=16, heads=2, inner=32, memory=8, forward_steps=8, backward_steps=8, gradient="jfb")
    chosen = LanguageSettings(data=TextData(name="toy", train=3_201, valid=400, test=400, length=8), model=model)
    # over six seeds the ratio to the best is 1.4 to 1.8 after two epochs, 1.6 to 3.5 after one
    training = Training(epochs=2, batch_size=8, eval_batch_size=8, optimizer=Optimizer(lr=2e-2), clip_norm=1.0)
    split = Trainer(Language(chosen), training, tmp_path).fit().final["split"]
    best = math.exp(sum(math.log(n) for n in (4, 6, 8, 5, 6, 8)) / 8)
    assert best < split["valid"]["perplexity"] < 2.5 * best


def test_pretraining_switches_the_equilibrium() -> None:
    task, net, loaders = begun()
    task.pretrain(net, True)
    assert isinstance(net.layer, DEQ)
    with record(net) as solutions:
        task.loss(net, loaders.train.batch(0, 0), 0)
    assert solutions[0].stats.evaluations <= net.pretraining_depth + 1
    task.pretrain(net, False)
    assert net.layer.gradient is net.gradient and not task.unrolled


def test_settings_that_are_valid_only_together_are_set_together() -> None:
    experiment = ptb("deq", "debug").changed(["model.kind=gru", "model.size=12"])
    assert (experiment.settings.model.kind, experiment.settings.model.size) == ("gru", "12")


@pytest.mark.parametrize("change", ["jitter=-1", "depths=0", "memories=-3", "at=0", "memory_depths=0"])
def test_settings_out_of_range_are_refused_before_training(change: str) -> None:
    with pytest.raises(SettingError, match="must"):
        ptb("deq", "debug").changed([change])
