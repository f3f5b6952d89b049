"""Measure how easy the package is to find one's way in: `python benchmarks/layout.py`.

Prints the functions, files and changes of file that one training step of the README's example runs through, forward and
backward, beside TorchDEQ's on the same cell; then the figures of the package: modules at the root, public names, private
functions used once, share of the laboratory, modules loaded by the import, comments, words of the README.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import equilibria as eq

ROOT = Path(__file__).parent.parent
PACKAGE = Path(eq.__file__).parent
# functions, files and changes of file of a training step, at most
LIMITS = {"forward": (60, 12, 30), "backward": (50, 10, 25)}
# Without kernels the steps of the solver and the record of its rows are Python functions too: some forty more, in five more
# files (bookkeeping, iterate_log, the solver, its base class and the algebra of rows), which call each other in turn.
LIMITS_IN_TORCH = {"forward": (95, 18, 65), "backward": (95, 16, 65)}
ROOT_MODULES = 12
PUBLIC_NAMES = 55  # about 50
USED_ONCE = 0.45  # share of the private functions
README_WORDS = 550  # about 500
SKIPPED = {"<lambda>", "<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<module>"}  # not functions one looks up


class Walk(NamedTuple):
    """The functions of a package that some work runs through, in the order of their first call: (file, name, line)."""

    calls: list[tuple[str, str, int]]

    @property
    def files(self) -> int:
        return len({file for file, _, _ in self.calls})

    @property
    def switches(self) -> int:
        """Times the reader changes the file when reading the functions in the order of their first call."""
        pairs = zip(self.calls, self.calls[1:], strict=False)
        return sum(before[0] != after[0] for before, after in pairs)


def walk(work: Callable[[], Any], package: Path) -> Walk:
    """Run `work` and list the functions of `package` that it enters; generated code (dataclasses) does not count."""
    seen: dict[tuple[str, str, int], None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name not in SKIPPED and code.co_filename.startswith(f"{package}/"):
            seen.setdefault((code.co_filename.removeprefix(f"{package}/"), code.co_name, code.co_firstlineno))

    before = sys.getprofile()
    with torch.autograd.set_multithreading_enabled(False):  # backward in this thread, where the profile function is set
        sys.setprofile(note)
        try:
            work()
        finally:
            sys.setprofile(before)
    return Walk(list(seen))


class Cell(nn.Linear):
    """z -> tanh(W z + b + x)."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return torch.tanh(super().forward(z) + x)


def our_step() -> tuple[Walk, Walk]:
    """Forward and backward of the README's example; a first step is run before, so that nothing is done only once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), eq.DEQ(Cell(32, 32)), nn.Linear(32, 3))
    return _step(model, torch.randn(8, 10), PACKAGE)


def peer_step() -> tuple[Walk, Walk] | None:
    """The same with TorchDEQ; None where it is not installed."""
    try:
        import torchdeq
    except ImportError:
        return None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inject, self.cell, self.head = nn.Linear(10, 32), Cell(32, 32), nn.Linear(32, 3)
            self.deq = torchdeq.get_deq(ift=True)

        def forward(self, x: Tensor) -> Tensor:
            u = self.inject(x)
            z, _ = self.deq(lambda z: self.cell(z, u), torch.zeros_like(u))
            return self.head(z[-1])

    torch.manual_seed(0)
    return _step(Model(), torch.randn(8, 10), Path(torchdeq.__file__).parent)


def _step(model: nn.Module, x: Tensor, package: Path) -> tuple[Walk, Walk]:
    for _ in range(2):
        model(x).square().mean().backward()
    losses: list[Tensor] = []
    forward = walk(lambda: losses.append(model(x).square().mean()), package)
    return forward, walk(losses[0].backward, package)


def root_modules() -> int:
    """The number of modules that stand flat at the root of the package."""
    return sum(not file.name.startswith("__") for file in PACKAGE.glob("*.py"))


def functions(tree: ast.AST) -> list[str]:
    return [node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def private_used_once(files: list[Path]) -> tuple[int, int]:
    """Private functions of the package, and how many of them are named at one place only beside their definition."""
    names: Counter[str] = Counter()
    private: set[str] = set()
    for file in files:
        tree = ast.parse(file.read_text())
        private |= {name for name in functions(tree) if name.startswith("_") and not name.startswith("__")}
        for node in ast.walk(tree):
            names.update([node.id] if isinstance(node, ast.Name) else [node.attr] if isinstance(node, ast.Attribute) else [])
    return len(private), sum(names[name] <= 1 for name in private)


def comments(files: list[Path]) -> tuple[int, int]:
    """Comments and lines that are not blank."""
    found = lines = 0
    for file in files:
        with tokenize.open(file) as text:
            found += sum(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(text.readline))
        lines += sum(bool(line.strip()) for line in file.read_text().splitlines())
    return found, lines


def loaded() -> list[str]:
    """Costly modules that the import brings in."""
    code = "import sys, equilibria; print(*[m for m in ('torch._dynamo', 'sympy', 'matplotlib') if m in sys.modules])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def words(readme: Path) -> int:
    """Words outside of code blocks."""
    return len(re.sub(r"^```.*?^```", "", readme.read_text(), flags=re.MULTILINE | re.DOTALL).split())


def rows() -> list[tuple[str, str, str, str]]:
    """What is measured, the figure, the aim, and TorchDEQ's figure."""
    files = sorted(PACKAGE.rglob("*.py"))
    lab = [file for file in files if (PACKAGE / "lab") in file.parents]
    private, once = private_used_once(files)
    found, lines = comments(files)
    peers = peer_step() or (None, None)
    table = [("modules at the root", str(root_modules()), str(ROOT_MODULES), "")]
    for (what, limit), ours, peer in zip(LIMITS.items(), our_step(), peers, strict=True):
        aim = ", ".join(map(str, limit))
        table.append((f"{what}: functions, files, changes of file", _show(ours), aim, _show(peer)))
    table += [
        ("private functions used once", f"{100 * once / private:.1f} % of {private}", f"{100 * USED_ONCE:.0f} %", ""),
        ("names in eq.__all__", str(len(eq.__all__)), "about 50", ""),
        ("share of the laboratory", f"{100 * comments(lab)[1] / lines:.0f} %, in lab/", "one folder", ""),
        ("costly modules loaded by the import", ", ".join(loaded()) or "none", "none", ""),
        ("comments per 100 lines", f"{100 * found / lines:.1f}", "about 4", ""),
        ("words of the README", str(words(ROOT / "README.md")), "about 500", ""),
    ]
    return table


def _show(walked: Walk | None) -> str:
    return "" if walked is None else f"{len(walked.calls)}, {walked.files}, {walked.switches}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--walk", choices=("forward", "backward"), help="list the functions of our step instead")
    if (which := parser.parse_args().walk) is not None:
        for file, name, line in our_step()[which == "backward"].calls:
            print(f"{file}:{line} {name}")
        return
    for what, figure, aim, peer in [("measured", "equilibria", "aim", "TorchDEQ"), *rows()]:
        print(f"{what:<42}{figure:<20}{aim:<14}{peer}")


if __name__ == "__main__":
    main()
