"""Datasets in memory, from their official files, and batches of them.

from equilibria.lab import data

cifar = data.load("cifar10")
for x, y in data.Batches(cifar.train, 128, augment=[data.Crop(4), data.Flip()], transform=cifar.normalize):
    ...
"""

from equilibria.lab.data.augment import Augmentation, Crop, Erase, Flip
from equilibria.lab.data.batches import Batches, GraphBatches, TextBatches
from equilibria.lab.data.camvid import reduce_camvid
from equilibria.lab.data.catalogue import check, fetch, info, load, names
from equilibria.lab.data.entries import Info
from equilibria.lab.data.files import DataError, File, FileState, data_root
from equilibria.lab.data.graphs import Graph, join
from equilibria.lab.data.mazes import MAZE_TOKENS, MazeSymmetry
from equilibria.lab.data.sets import IGNORE, Dataset, Split, hold_out
from equilibria.lab.data.sudoku import SudokuSymmetry

__all__ = [
    "IGNORE",
    "MAZE_TOKENS",
    "Augmentation",
    "Batches",
    "Crop",
    "DataError",
    "Dataset",
    "Erase",
    "File",
    "FileState",
    "Flip",
    "Graph",
    "GraphBatches",
    "Info",
    "MazeSymmetry",
    "Split",
    "SudokuSymmetry",
    "TextBatches",
    "check",
    "data_root",
    "fetch",
    "hold_out",
    "info",
    "join",
    "load",
    "names",
    "reduce_camvid",
]
