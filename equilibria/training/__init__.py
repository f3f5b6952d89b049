"""Training: one loop for all experiments, and the folders of its runs.

from equilibria import training

summary = training.Trainer(task, training.Training(epochs=10), Path("runs/digits")).fit()
"""

from equilibria.training.checkpoints import CorruptCheckpointError
from equilibria.training.folder import Run, Summary
from equilibria.training.listeners import Listener, PlainLog, Silent
from equilibria.training.settings import Optimizer, Schedule, Training, from_plain, one_of, to_plain
from equilibria.training.stepping import TrainingError
from equilibria.training.task import Loader, Loaders, Outcome, Task
from equilibria.training.trainer import Interrupted, Trainer

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
    "Schedule",
    "Silent",
    "Summary",
    "Task",
    "Trainer",
    "Training",
    "TrainingError",
    "from_plain",
    "one_of",
    "to_plain",
]
