"""Runs the notebooks of this folder and writes their outputs: python notebooks/execute.py [--check] [NAME ...]

--check runs them and writes nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
SECONDS = 300  # of a cell, on a machine that is busy


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a new kernel that runs in this folder; raises where a cell does."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(HERE)}}).execute()
    for cell in notebook.cells:
        cell.metadata = nbformat.NotebookNode()  # times of execution, which differ from run to run
    notebook.metadata = nbformat.NotebookNode(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"}, language_info={"name": "python"}
    )
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("names", nargs="*", help="by default all")
    options = parser.parse_args()
    for path in sorted(HERE.glob("*.ipynb")):
        if not options.names or path.stem in options.names:
            notebook = executed(path)
            if not options.check:
                nbformat.write(notebook, path)
            print(f"{path.name}: {len(notebook.cells)} cells", flush=True)


if __name__ == "__main__":
    main()
