"""Model files: all bits are restored, no code is run, and files that do not fit are refused."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.models.files import KEY, ModelFileError, load, read_info, save
from equilibria.models.images.lion import Lion, LionConfig
from equilibria.models.images.mdeq_configs import MDEQ_CONFIGS
from equilibria.models.images.neural_ode import AdaptiveSteps
from equilibria.models.images.skip_mlp import SkipSolver
from equilibria.models.origins import from_data, origin_of, remember_origin, to_data
from equilibria.models.registry import create, info, names
from equilibria.stop import max_norm


def made(name: str, **options: Any) -> nn.Module:
    """Return a model created by name, which stores its options and defaults."""
    torch.manual_seed(0)
    entry = info(name)
    bound = inspect.signature(entry.build).bind(**(dict(entry.options) | options))
    bound.apply_defaults()
    return remember_origin(create(name, **options), name, bound.arguments)


def small(**options: Any) -> nn.Module:
    return made("skip-mlp-v2", **({"inputs": 5, "width": 4, "classes": 3} | options))


def bits(tensor: Tensor) -> list[int]:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).tolist()


def assert_same(a: nn.Module, b: nn.Module) -> None:
    """Check that two states have equal names, dtypes, shapes and bits."""
    left, right = a.state_dict(), b.state_dict()
    assert list(left) == list(right)
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and tensor.shape == right[name].shape, name
        assert bits(tensor) == bits(right[name]), name


class Odd(nn.Module):
    """A module with tensors of every kind, one of them with a memory layout that safetensors refuses."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.turned = nn.Parameter(torch.randn(3, 4, generator=g).t())
        self.brain = nn.Parameter(torch.randn(5, generator=g).bfloat16())
        self.wide = nn.Parameter(torch.randn(2, 2, generator=g, dtype=torch.float64))
        self.waves = nn.Parameter(torch.randn(3, generator=g, dtype=torch.complex128))
        base = torch.randn(8, generator=g)
        self.register_buffer("first", base[:4])
        self.register_buffer("strided", base[::2])
        self.register_buffer("flat", base)
        self.register_buffer("folded", base.view(2, 4))
        self.register_buffer("mirrored", torch.randn(2, generator=g, dtype=torch.complex64).conj())
        self.register_buffer("negative", torch.randn(2, generator=g, dtype=torch.complex64).conj().imag)
        self.register_buffer("count", torch.tensor(2**62 + seed))
        self.register_buffer("mask", torch.rand(7, generator=g) > 0.5)
        self.register_buffer("bytes", torch.randint(0, 255, (3,), generator=g, dtype=torch.uint8))
        self.register_buffer("eighth", torch.randn(3, generator=g).to(torch.float8_e4m3fn))
        self.register_buffer("strange", torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("nothing", None)


class Tied(nn.Module):
    """A small language model with tied input and output weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4)
        self.output = nn.Linear(4, 6, bias=False)
        self.output.weight = self.words.weight
        self.again = self.output


def test_every_bit_of_every_kind_of_tensor_comes_back(tmp_path: Path) -> None:
    model, other = Odd(0), Odd(1)
    path = save(model, tmp_path / "new" / "odd.safetensors")
    assert load(path, other) is other
    assert_same(model, other)
    assert read_info(path).shapes == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def test_the_same_model_gives_the_same_bytes_and_replaces_a_file(tmp_path: Path) -> None:
    a, b = save(small(), tmp_path / "a"), save(nn.Linear(2, 2), tmp_path / "b")
    save(small(), b)
    assert a.read_bytes() == b.read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b"]


def test_a_failed_write_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(small(), tmp_path / "model")
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"cannot write .*model: No space left"):
        save(small(width=8), path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    path = save(model, tmp_path / "tied")
    with safetensors.safe_open(str(path), framework="pt") as file:
        assert list(file.keys()) == ["words.weight"]
    assert set(read_info(path).aliases.values()) == {"words.weight"}
    load(path, other)
    assert_same(model, other)
    assert other.output.weight is other.words.weight
    untied = Tied()
    untied.output = untied.again = nn.Linear(4, 6, bias=False)
    load(path, untied)
    torch.testing.assert_close(untied.output.weight, model.words.weight, rtol=0, atol=0)


def test_weights_that_differ_are_not_forced_into_tied_ones(tmp_path: Path) -> None:
    untied, model = Tied(), Tied()
    untied.output = untied.again = nn.Linear(4, 6, bias=False)
    before = model.words.weight.clone()
    with pytest.raises(
        ModelFileError, match=r"tied weights of the model differ in the file: words\.weight and output\.weight"
    ):
        load(save(untied, tmp_path / "untied"), model)
    assert torch.equal(model.words.weight, before)


@pytest.mark.parametrize(
    "build",
    [
        lambda: small(),
        lambda: small(variant="skip", solver=SkipSolver(tolerance=1e-6, max_steps=7)),
        lambda: small(depth=3),
        lambda: made("mdeq-cifar-tiny", classes=4, solver=eq.Anderson(history=3), eval_stop=eq.Stop(norm=max_norm)),
        lambda: made("jfb-resnet-mnist-jacobian"),
        lambda: made("anode-mnist", integrator=AdaptiveSteps(rtol=1e-2)),
        lambda: made("mon-mlp-mnist", gradient=eq.Warmup(until=5)),
        lambda: made("resnet-56"),
    ],
)
def test_a_model_is_created_from_its_file_alone(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    model = build()
    path = save(model, tmp_path / "model")
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    other = load(path)
    assert torch.equal(torch.rand(2), expected)  # as if no weights had been drawn
    assert type(other) is type(model)
    assert_same(model, other)
    layers, others = (dict(m.named_modules()) for m in (model, other))
    for name, layer in layers.items():
        if isinstance(layer, eq.DEQ):
            twin = others[name]
            assert isinstance(twin, eq.DEQ)
            assert (twin.solver, twin.stop, twin.gradient) == (layer.solver, layer.stop, layer.gradient)
            assert twin.eval_stop == layer.eval_stop


def test_a_model_computes_the_same_after_it_was_stored(tmp_path: Path) -> None:
    model = small()
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    assert torch.equal(load(save(model, tmp_path / "m"))(x), model(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_created_from_a_file_has_the_saved_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    model = made("jfb-resnet-mnist").to(dtype)
    other = load(save(model, tmp_path / "m"))
    assert_same(model, other)
    mixed = small()
    mixed.get_submodule("head").double()
    assert_same(mixed, load(save(mixed, tmp_path / "mixed")))


def test_a_given_model_keeps_its_dtypes(tmp_path: Path) -> None:
    model = nn.Linear(3, 2).double()
    other = load(save(model, tmp_path / "m"), nn.Linear(3, 2))
    assert torch.equal(other.weight, model.weight.float())


def test_every_model_of_the_registry_stores_its_name_and_options() -> None:
    for name in names():
        entry = info(name)
        bound = inspect.signature(entry.build).bind(**dict(entry.options))
        bound.apply_defaults()
        for option, value in bound.arguments.items():
            assert from_data(json.loads(json.dumps(to_data(value), allow_nan=False))) == value, f"{option} of {name}"


VALUES: list[Any] = [
    None,
    True,
    -3,
    0.1,
    float("inf"),
    "text",
    (1, (2.0, "three"), []),
    [(1,), [2]],
    {"tuple": [1], "settings": {"values": 2}},
    eq.Stop(norm=eq.stop.max_norm, process_group="world"),
    eq.Fallback(eq.Anderson(), eq.Restart(eq.Broyden(), every=5), patience=3),
    eq.Escalate(),
    eq.FirstStep(eq.Zeros(2, 3)),
    MDEQ_CONFIGS["cifar-large"],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_options_survive_as_json_data(value: Any) -> None:
    back = from_data(json.loads(json.dumps(to_data(value), allow_nan=False)))
    assert back == value and type(back) is type(value) and repr(back) == repr(value)


@dataclass(frozen=True)
class Foreign:
    size: int = 1


@pytest.mark.parametrize("value", [Foreign(), nn.Linear(1, 1), torch.zeros(1), lambda x: x, {1: 2}, eq.Stop, 1j])
def test_other_values_cannot_become_json_data(value: Any) -> None:
    with pytest.raises(TypeError, match="A file can hold numbers, strings, lists"):
        to_data(value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"settings": "os.system", "values": {}}, "no settings class 'os.system'"),
        ({"settings": "deq.DEQ", "values": {}}, "no settings class 'deq.DEQ'"),
        (
            {"settings": "models.registry.create", "values": {"name": "resnet-56"}},
            "no settings class 'models.registry.create'",
        ),
        ({"settings": 3, "values": {}}, "no settings class 3"),
        ({"settings": "solve.Stop", "values": {"gone": 1}}, "Stop has no setting gone"),
        ({"settings": "solve.Stop", "values": {"rtol": -1.0}}, "must not be negative"),
        ({"settings": "solvers.fallback.Fallback", "values": {"patience": 3}}, "Fallback needs the setting solvers"),
        ({"norm": "eval"}, "Expected a value that the library wrote"),
        ({"float": "1.0; import os"}, "Expected a value that the library wrote"),
        ({}, "Expected a value that the library wrote"),
    ],
)
def test_json_data_creates_only_settings(data: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_data(data)


def test_copies_of_a_model_keep_its_name_and_options() -> None:
    model = small()
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        origin = origin_of(other)
        assert origin is not None and origin.name == "skip-mlp-v2" and origin.options["width"] == 4
    assert origin_of(nn.Linear(1, 1)) is None
    assert "_origin" not in model.state_dict()


def test_information_is_read_without_the_weights(tmp_path: Path) -> None:
    saved = read_info(save(small(), tmp_path / "m"))
    assert (saved.kind, saved.name, saved.version) == ("SkipMLP", "skip-mlp-v2", eq.__version__)
    assert saved.options["width"] == 4 and saved.options["solver"] == SkipSolver()
    assert saved.shapes["head.weight"] == (3, 4)


def test_options_that_cannot_be_stored_are_named_and_the_weights_are_saved(tmp_path: Path) -> None:
    config = LionConfig(features=6, image_channels=1, image_hidden=4, feature_hidden=8, groups=2)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 6))
    model = remember_origin(Lion(backbone, config), "lion", {"backbone": backbone, "config": config})
    path = save(model, tmp_path / "m")
    assert read_info(path).options == {"config": config} and read_info(path).lost == {"backbone": "Sequential"}
    with pytest.raises(
        ModelFileError, match=r"lacks these options of its lion, which a file cannot hold: backbone \(a Sequential\)"
    ):
        load(path)
    assert_same(model, load(path, Lion(nn.Sequential(nn.Flatten(), nn.Linear(64, 6)), config)))


def test_a_file_of_a_model_made_by_hand_needs_a_model_to_load_into(tmp_path: Path) -> None:
    path = save(nn.Linear(2, 3), tmp_path / "m")
    with pytest.raises(
        ModelFileError, match=r"does not describe how to create its model\. It holds a Linear that create\(\) did not make"
    ):
        load(path)
    safetensors.torch.save_file({"weight": torch.ones(3, 2), "bias": torch.zeros(3)}, tmp_path / "foreign")
    with pytest.raises(ModelFileError, match="Another program wrote it"):
        load(tmp_path / "foreign")
    assert torch.equal(load(tmp_path / "foreign", nn.Linear(2, 3)).weight, torch.ones(3, 2))
    assert read_info(tmp_path / "foreign").version is None


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: small(width=5), r"encoder\.1\.weight is \(4, 5\) in the file and \(5, 5\) in the model"),
        (lambda: small(variant="skip"), r"the file lacks layer\.init\.0\.weight, layer\.init\.0\.bias\."),
        (lambda: nn.Linear(4, 3), r"lacks weight, bias; the model has no encoder\.1\.bias, .* and 3 more\."),
    ],
)
def test_weights_that_do_not_fit_are_named_and_nothing_is_changed(
    other: Callable[[], nn.Module], said: str, tmp_path: Path
) -> None:
    model = other()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelFileError, match=said) as caught:
        load(save(small(), tmp_path / "m"), model)
    assert "The file holds skip-mlp-v2: load(path) creates it" in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_real_complex_and_integer_tensors_are_not_converted(tmp_path: Path) -> None:
    counting, measuring = nn.Module(), nn.Module()
    counting.register_buffer("n", torch.ones((), dtype=torch.int64))
    measuring.register_buffer("n", torch.ones(()))
    with pytest.raises(ModelFileError, match=r"n is torch\.int64 in the file and torch\.float32 in the model"):
        load(save(counting, tmp_path / "m"), measuring)


def test_a_model_that_was_changed_after_its_creation_is_refused(tmp_path: Path) -> None:
    model = small()
    model.register_module("more", nn.Linear(1, 1))
    with pytest.raises(ModelFileError, match=r"the model has no more\.bias, more\.weight\. The model was changed after"):
        load(save(model, tmp_path / "m"))


def altered(path: Path, **changes: Any) -> Path:
    """Write a copy of the file with changed metadata."""
    with safetensors.safe_open(str(path), framework="pt") as file:
        notes = json.loads(file.metadata()[KEY]) | changes
        tensors = {name: file.get_tensor(name).clone() for name in list(file.keys())}  # or they would stay in the file
    safetensors.torch.save_file(tensors, path, {KEY: json.dumps(notes)})
    return path


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = save(small(), tmp_path / "m")
    data = path.read_bytes()
    path.write_bytes(data[:-5])
    with pytest.raises(ModelFileError, match="damaged or not a safetensors file"):
        load(path)
    path.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
    with pytest.raises(ModelFileError, match="its sha256 differs"):
        load(path, small())
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match="its sha256 differs"):
        load(altered(path, name="skip-mlp-vanilla"))


@pytest.mark.parametrize("content", [b"", b"no model", pickle.dumps({"weight": 1}), b"PK\x03\x04" + bytes(100)])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(content)
    for read in (load, read_info):
        with pytest.raises(ModelFileError, match="damaged or not a safetensors file"):
            read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist: pass a file"):
        load(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="is a folder"):
        read_info(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 99, "version": "9.9"}, r"written by version 9\.9 of the library, in format 99"),
        ({"format": "one"}, "its metadata is invalid"),
        ({"aliases": {"a": "b"}}, "its metadata is invalid"),
        ({"options": {"solver": {"settings": "gone.Gone", "values": {}}}}, "options that this version .* cannot read"),
        ({"name": "gone"}, "holds a gone of version .* cannot make: There is no model 'gone'"),
        ({"options": {"gone": 1}}, "cannot make: skip-mlp-v2 has no option gone"),
    ],
)
def test_files_of_other_versions_are_reported(
    changes: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = altered(save(small(), tmp_path / "m"), **changes)
    monkeypatch.setattr("equilibria.models.files._digest", lambda tensors, notes: notes["sha256"])
    with pytest.raises(ModelFileError, match=said):
        load(path)


def test_meta_lazy_and_sparse_tensors_are_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        meta = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="weight is on the meta device"):
        save(meta, tmp_path / "m")
    with pytest.raises(ModelFileError, match="the model is on the meta device"):
        load(save(nn.Linear(2, 2), tmp_path / "m"), meta)
    with pytest.raises(ValueError, match="weight is a lazy parameter without a shape: run the model once"):
        save(nn.LazyLinear(2), tmp_path / "m")
    sparse = nn.Module()
    sparse.register_buffer("graph", torch.eye(2).to_sparse())
    with pytest.raises(ValueError, match=r"graph is sparse .* to_dense"):
        save(sparse, tmp_path / "m")
    assert isinstance(load(save(nn.ReLU(), tmp_path / "m"), nn.ReLU()), nn.ReLU)
    lazy = load(save(nn.Linear(3, 2), tmp_path / "m"), nn.LazyLinear(2))
    assert lazy.weight.shape == (2, 3)


class Extra(nn.Module):
    """A module with state that is not a tensor."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def test_state_that_is_no_tensor_is_stored(tmp_path: Path) -> None:
    path = save(nn.Sequential(Extra((3, {"epoch": 0.5}))), tmp_path / "m")
    assert load(path, nn.Sequential(Extra(None)))[0].value == (3, {"epoch": 0.5})
    with pytest.raises(TypeError, match=r"at 0\._extra_state that a file cannot hold"):
        save(nn.Sequential(Extra(object())), path)


def test_a_wrapped_model_is_saved_and_loaded_as_what_it_wraps(tmp_path: Path) -> None:
    model = small()
    path = save(nn.DataParallel(model), tmp_path / "a")
    compiled: Any = torch.compile(model)
    assert path.read_bytes() == save(compiled, tmp_path / "b").read_bytes() == save(model, path).read_bytes()
    wrapped = nn.DataParallel(small(width=4))
    assert load(path, wrapped) is wrapped
    assert_same(wrapped.module, model)


def test_create_remembers_what_it_was_given_and_the_defaults(tmp_path: Path) -> None:
    with torch.device("meta"):
        for name in names():
            origin = origin_of(create(name))
            assert origin is not None and origin.name == name
            assert set(origin.options) == set(inspect.signature(info(name).build).parameters)
    model = create("skip-mlp-v2", inputs=5, width=4)
    assert origin_of(load(save(model, tmp_path / "m"))) == origin_of(model)
