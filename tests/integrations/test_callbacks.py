"""The monitors for other libraries, with those libraries."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq

REASON = "needs the extra `integrations`: pip install 'equilibria[integrations]'"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Ignore warnings of these libraries about themselves and the machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", eq.ConvergenceWarning)
        yield


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        nn.init.orthogonal_(self.linear.weight, 0.5)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(z) + x)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), eq.DEQ(Cell()), nn.Linear(6, 1))


def dataset(rows: int = 32) -> torch.utils.data.TensorDataset:
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 4, generator=draws)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the points of TensorBoard events by name."""
    module: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.rglob("events*")):
        events = module.EventAccumulator(str(file)).Reload()
        for name in events.Tags()["scalars"]:
            found.setdefault(name, []).extend((event.step, event.value) for event in events.Scalars(name))
    return found


def test_lightning_logs_a_row_per_batch_and_leaves_validation_out(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason=REASON)
    from lightning.pytorch.loggers import CSVLogger

    class Regression(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            x, y = batch
            return nn.functional.mse_loss(self.net(x), y)

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return self.loss(batch)

        def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
            self.log("valid", self.loss(batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    batches = torch.utils.data.DataLoader(dataset(), batch_size=8)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=[eq.integrations.LightningMonitor()],
        logger=CSVLogger(tmp_path),
        log_every_n_steps=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Regression(), batches, batches)
    metrics = trainer.callback_metrics
    assert metrics["deq/net.1/converged"] == 1 and metrics["deq/net.1/samples"] == 8
    assert metrics["deq/net.1/adjoint/converged"] == 1
    head, *rows = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()
    place = head.split(",").index("deq/net.1/steps_max")
    assert sum(bool(row.split(",")[place]) for row in rows) == 4  # 2 epochs of 4 batches, every other one


def test_an_interrupted_training_leaves_no_monitor_on_a_lightning_module(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason=REASON)

    class Broken(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            self.net(batch[0])
            raise RuntimeError("broken")

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    callback = eq.integrations.LightningMonitor()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], logger=False, **quiet)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(Broken(), torch.utils.data.DataLoader(dataset(), batch_size=8))
    with eq.record(network()) as solutions:
        pass
    assert callback._monitor is None and solutions == []


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_hugging_face_trainer_logs_convergence_at_its_logging_steps(tmp_path: Path, accumulation: int) -> None:
    transformers = pytest.importorskip("transformers", reason=REASON)
    pytest.importorskip("accelerate", reason=REASON)

    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            out = self.net(x)
            return {"loss": nn.functional.mse_loss(out, labels), "logits": out}

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    rows = [{"x": x, "labels": y} for x, y in zip(*dataset().tensors, strict=True)]
    trainer = transformers.Trainer(Regression(), arguments, train_dataset=rows, eval_dataset=rows)
    chosen = ("samples", "converged", "steps_max")
    trainer.add_callback(eq.integrations.TrainerMonitor(trainer, quantities=chosen))
    trainer.train()
    logged = [row for row in trainer.state.log_history if "deq/net.1/converged" in row]
    assert [row["step"] for row in logged] == [2, 4]
    assert all(row["deq/net.1/samples"] == 4 and row["deq/net.1/adjoint/converged"] == 1 for row in logged)
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == [2, 4]  # the Trainer's own rows stay
    assert not [name for row in logged for name in row if "residual" in name or "net.1.2" in name]


def test_accelerate_writes_the_step_of_every_row(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason=REASON)
    pytest.importorskip("tensorboard", reason=REASON)
    accelerator = accelerate.Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")
    net = network()
    model, optimizer, batches = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), 0.01), torch.utils.data.DataLoader(dataset(), batch_size=8)
    )
    with eq.integrations.accelerate_monitor(accelerator, model, first_step=10):
        for x, y in batches:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()
    found = scalars(tmp_path)
    assert found["deq/1/samples"] == [(step, 8.0) for step in range(10, 14)]
    assert found["deq/1/adjoint/converged"] == [(step, 1.0) for step in range(10, 14)]


def test_a_resumed_run_continues_its_tensorboard_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason=REASON)
    net = network()
    for first in (0, 3):
        with eq.integrations.tensorboard_monitor(net, tmp_path, first_step=first, quantities=["converged"]) as monitor:
            for x, y in torch.utils.data.DataLoader(dataset(24), batch_size=8):
                nn.functional.mse_loss(net(x), y).backward()
        assert monitor.step == first + 2
    found = scalars(tmp_path)
    assert set(found) == {"deq/1/converged", "deq/1/adjoint/converged"}
    assert sorted(found["deq/1/converged"]) == [(step, 1.0) for step in range(6)]


def test_a_missing_library_is_named_with_its_extra() -> None:
    program = "import sys; sys.modules['lightning'] = None; import equilibria as eq; eq.integrations.LightningMonitor"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'equilibria[integrations]'" in done.stderr.splitlines()[-1]


def test_importing_the_package_loads_no_library_and_a_misspelled_name_raises() -> None:
    program = "import sys, equilibria as eq; eq.integrations; print({'lightning', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "set()\n"
    with pytest.raises(AttributeError, match="no attribute 'LightningMonitr'"):
        eq.integrations.LightningMonitr  # noqa: B018
    assert set(eq.integrations.__all__) <= set(dir(eq.integrations))
