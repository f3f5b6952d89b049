"""Training: one loop for all experiments, and the folders of its runs.

from equilibria.lab import training

summary = training.Trainer(task, training.Training(epochs=10), Path("runs/digits")).fit()
"""

from equilibria._core.files import missing

try:
    from equilibria._core.plain import to_plain
    from equilibria.lab.errors import CorruptCheckpointError, TrainingError
    from equilibria.lab.training.folder import Run, RunSummary
    from equilibria.lab.training.listeners import Listener, PlainLog, Silent
    from equilibria.lab.training.settings import Optimizer, Schedule, Training, from_plain, one_of
    from equilibria.lab.training.task import Loader, Loaders, Outcome, Task
    from equilibria.lab.training.trainer import Interrupted, Trainer
except ModuleNotFoundError as error:
    raise missing(error, "train") from error

__all__ = [
    "CorruptCheckpointError",
    "Interrupted",
    "Listener",
    "Loader",
    "Loaders",
    "Optimizer",
    "Outcome",
    "PlainLog",
    "Run",
    "RunSummary",
    "Schedule",
    "Silent",
    "Task",
    "Trainer",
    "Training",
    "TrainingError",
    "from_plain",
    "one_of",
    "to_plain",
]
