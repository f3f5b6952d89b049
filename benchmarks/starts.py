"""What a solve of a trained DEQ-Transformer starts from, and the evaluations that takes: `python benchmarks/starts.py RUN`

RUN is the folder of a language experiment, as `equilibria train ptb-transformer-deq --scale reduced` makes it. All starts
lead to the same equilibria; the loss beside them shows it. Text is read in segments, as in evaluation, and token by token,
as when it is generated.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

import equilibria as eq
from equilibria.lab.experiments.evaluation import experiment_of
from equilibria.lab.training.folder import Run
from equilibria.models.language.deq_transformer import DEQTransformer, TransformerStart


def read(model: DEQTransformer, pieces: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Evaluations per sample and piece of the text, and the mean loss."""
    memory, evaluations, losses = None, [], []
    for x, y in pieces:
        with eq.record(model) as solutions, torch.no_grad():
            loss, memory = model(x, memory, y)
        evaluations += [s.stats.sample_evaluations / len(x) for s in solutions]
        losses.append(float(loss))
    return sum(evaluations) / len(evaluations), sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path, help="folder of the datasets")
    args = parser.parse_args()
    torch.set_num_threads(1)
    run = Run.open(args.run)
    experiment = experiment_of(run)
    task = experiment.task()
    task.prepare(args.data, experiment.training)
    model: Any = run.model(task)
    loader: Any = task.batches(args.data, experiment.training, 0, 1).test
    segments = [(s.x, s.y) for s in loader]
    tokens = [pair for x, y in segments[:1] for pair in zip(x.split(1, dim=1), y.split(1, dim=1), strict=True)]
    print(f"{'start':10} {'rtol':>6} {'evaluations':>12} {'loss':>8} {'token by token':>15}")
    for rtol in (1e-3, 1e-5):
        model.layer.eval_stop = eq.Stop(rtol=rtol, atol=0.0, max_steps=100, on_failure="ignore")
        for model.start in get_args(TransformerStart):
            (evaluations, loss), (single, _) = read(model, segments), read(model, tokens)
            print(f"{model.start:10} {rtol:6.0e} {evaluations:12.2f} {loss:8.4f} {single:15.2f}")


if __name__ == "__main__":
    main()
