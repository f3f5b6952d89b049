"""A run as a model repository: weights, model card, results, configuration and provenance.

The layout is that of the Hugging Face hub: `README.md` with its metadata on top, `.eval_results/*.yaml`, safetensors.
Nothing is uploaded; `huggingface_hub.upload_folder` takes the folder as it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

import equilibria
from equilibria._core.files import replace_file
from equilibria._core.plain import to_plain
from equilibria.lab.data.catalogue import info as data_info
from equilibria.lab.data.catalogue import names as data_names
from equilibria.lab.data.files import data_root
from equilibria.lab.experiments.definitions import Experiment
from equilibria.lab.experiments.evaluation import experiment_of
from equilibria.lab.reports.measured import machine_of, read_machine
from equilibria.lab.training.folder import Run
from equilibria.models.files import save
from equilibria.models.registry import create
from equilibria.models.states import check_fit

WEIGHTS, CARD, CONFIG, PROVENANCE = "model.safetensors", "README.md", "config.json", "provenance.json"
RESULTS = ".eval_results"
METRICS = {"accuracy", "perplexity", "micro_f1"}  # results beside the metric that chose the epoch
TASKS = {  # tasks of the hub by the kind of the data; the kind itself for others
    "images": "image-classification",
    "segmentation": "image-segmentation",
    "text": "text-generation",
    "graphs": "graph-ml",
    "nodes": "graph-ml",
}


def publish(
    run: Run,
    folder: Path,
    *,
    which: str = "best",
    root: Path | None = None,
    name: str | None = None,
    named: str | None = None,
) -> dict[str, Any]:
    """Write a finished run to `folder`, and return its provenance.

    root   folder of the datasets, for checksums
    name   name of the model in `eq.models.names()`: `eq.models.load` then creates the model from the file alone
    named  FILE.py:NAME of the run's experiment, if it is the user's own
    """
    if run.summary is None:
        raise ValueError(f"The run in {run.folder} is not finished. Train it to its end before you publish it.")
    experiment = experiment_of(run, named)
    model = run.model(experiment.task(), which)
    if name is not None:
        model = named_model(name, model)
    folder.mkdir(parents=True, exist_ok=True)
    weights = save(model, folder / WEIGHTS)
    found = provenance(run, experiment, weights, which, root) | {"model": name}
    replace_file(folder / CONFIG, _json(run.config))
    replace_file(folder / PROVENANCE, _json(found))
    replace_file(folder / CARD, model_card(experiment, found).encode())
    (folder / RESULTS).mkdir(exist_ok=True)
    replace_file(folder / RESULTS / f"{experiment.name}.yaml", evaluation_results(experiment, found).encode())
    return found


def named_model(name: str, trained: nn.Module) -> nn.Module:
    """Return the model that `create(name)` makes, with the weights of `trained`; raises ValueError if they do not fit."""
    model, state = create(name), trained.state_dict()
    if problem := check_fit(model, state):
        raise ValueError(
            f"The weights of this run do not fit the model {name!r}: {problem} Pass the name of the model that the "
            "experiment trains, or none."
        )
    model.load_state_dict(state)
    return model


def provenance(run: Run, experiment: Experiment[Any], weights: Path, which: str, root: Path | None) -> dict[str, Any]:
    """Return the origin of the weights: experiment, hash of its settings, data, commit, machine and measurements."""
    assert run.summary is not None
    # the metrics must be those of the weights that are written
    chosen = run.summary["best"] if which == "best" else run.summary["final"]
    return {
        "experiment": experiment.name,
        "scale": experiment.scale,
        "summary": experiment.summary,
        "weights": which,
        "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "config_sha256": config_hash(run.config),
        "parameters": run.summary["parameters"],
        "epochs": run.summary["epochs"],
        "seed": run.training.seed,
        "chosen_by": chosen.get("by", {}).get("split"),
        "metrics": {split: metrics for split, metrics in chosen["split"].items() if split != "train"},
        "data": data_checksums(experiment, root),
        "commit": read_machine(run.folder).get("commit"),
        "environment": {"machine": machine_of(run), "versions": run.config.get("versions", {})},
        "written_by": f"equilibria {equilibria.__version__}",
    }


def config_hash(config: Mapping[str, Any]) -> str:
    """Return the hash of the experiment and its settings, without versions."""
    # equal settings must have equal hashes on all machines
    meant = {key: value for key, value in config.items() if key != "versions"}
    return hashlib.sha256(json.dumps(meant, sort_keys=True).encode()).hexdigest()


def data_checksums(experiment: Experiment[Any], root: Path | None) -> dict[str, dict[str, str]]:
    """Return checksums by dataset and file: "sha256:..." of the present file, or the official one if it is missing."""
    place = data_root(root)
    found: dict[str, dict[str, str]] = {}
    # settings have no common field for the dataset, so every string that is the name of a dataset counts
    for name in sorted(set(_strings(to_plain(experiment.settings))) & set(data_names())):
        files = {}
        for file in data_info(name).files:
            path = file.locate(place)
            digest = None if path is None else f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
            files[file.path] = digest or file.checksum or "unknown"
        found[name] = files
    return found


def model_card(experiment: Experiment[Any], found: Mapping[str, Any]) -> str:
    """Return the text of README.md: metadata for the hub, then a description with measurements and provenance."""
    head = [
        "---",
        "library_name: equilibria",
        "license: mit",
        f"tags: [deep-equilibrium-model, {experiment.name}]",
        *([f"datasets: [{', '.join(found['data'])}]"] if found["data"] else []),
        "---",
    ]
    metrics = [f"| {split} | {name} | {number:.6g} |" for split, name, number in _numbers(found["metrics"])]
    commit = found["commit"] or "not recorded"
    summary = found["summary"][:1].upper() + found["summary"][1:]
    chosen = f", the epoch chosen by the {found['chosen_by']} split" if found["chosen_by"] else ""
    parts = [
        "\n".join(head),
        f"# {experiment.name}",
        f"{summary}. {found['parameters']:,} parameters, {found['epochs']} epochs at the {found['scale']} scale, "
        f"seed {found['seed']}{chosen}.",
        f"```python\n{loading(found)}\n```",
        f"The architecture is that of `equilibria train {experiment.name} --scale {experiment.scale}`; its settings are in "
        f"`{CONFIG}`.",
        "## Measured",
        "\n".join(["| split | metric | value |", "|---|---|---:|", *metrics]),
        "## Provenance",
        f"Commit {commit}; {found['environment']['machine']}. Hash of the settings: `{found['config_sha256']}`. "
        f"Checksums of weights and data are in `{PROVENANCE}`.",
    ]
    return "\n\n".join(parts) + "\n"


def loading(found: Mapping[str, Any]) -> str:
    """Return the Python code that loads the weights in the published folder."""
    if found["model"] is not None:
        return f'import equilibria as eq\n\nmodel = eq.models.load("{WEIGHTS}")  # {found["model"]}'
    return (
        "import json\nfrom pathlib import Path\n\nimport equilibria as eq\n"
        "from equilibria.lab.experiments.catalogue import experiment\n\n"
        f'settings = json.loads(Path("{CONFIG}").read_text())\n'
        f'task = experiment("{found["experiment"]}", "{found["scale"]}").restored(settings).task()\n'
        f'model = eq.models.load("{WEIGHTS}", task.model())'
    )


def evaluation_results(experiment: Experiment[Any], found: Mapping[str, Any]) -> str:
    """Return the results in the hub's YAML format; strings are written as JSON, which is valid YAML.

    The hub knows neither metrics nor splits, which stand in the notes. The dataset has its name in this library: for a
    leaderboard of the hub, replace it by the name of the benchmark there.
    """
    lines = []
    shown = METRICS | {experiment.task().better[0]}
    data = next(iter(found["data"]), None)
    kind = "generated" if data is None else data_info(data).kind
    setting = f"{experiment.name}, {experiment.scale} scale, seed {found['seed']}"
    for split, name, number in _numbers(found["metrics"]):
        if name not in shown:
            continue
        dataset = {"id": data or kind, "task_id": TASKS.get(kind, kind)}
        lines += [
            f"- dataset: {json.dumps(dataset)}",
            f"  value: {number!r}",
            f"  notes: {json.dumps(f'{name} on the {split} split; {setting}')}",
        ]
    return "\n".join(lines) + "\n" if lines else "[]\n"


def _numbers(metrics: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, float]]:
    """Yield (split, name, value) of every metric that is a number."""
    for split, values in metrics.items():
        for name, number in values.items():
            if isinstance(number, (int, float)):
                yield split, name, float(number)


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in nested settings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _strings(part)


def _json(value: Any) -> bytes:
    return (json.dumps(to_plain(value), indent=1) + "\n").encode()
