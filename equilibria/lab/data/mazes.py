"""Generated puzzles: perfect mazes with the path from start to goal, and prefix sums of bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from random import Random

import torch
from torch import Tensor

from equilibria.lab.data.sets import Dataset, Split, cut, generator

WALL, FREE, START, GOAL, PATH = range(5)
MAZE_TOKENS = ("#", " ", "S", "G", "o")
ATTEMPTS = 200  # mazes drawn per requested maze before the request fails

Grid = list[list[int]]


def carve(size: int, draws: Random) -> Grid:
    """Return a perfect maze with walls around it, by depth-first search.

    In a perfect maze there is exactly one path between any two free cells.
    """
    grid = [[WALL] * size for _ in range(size)]
    trail = [(1, 1)]
    grid[1][1] = FREE
    while trail:
        r, c = trail[-1]
        # free cells are two apart; the wall between two of them is removed when they are joined
        steps = [(r + dr, c + dc) for dr, dc in ((0, 2), (2, 0), (0, -2), (-2, 0))]
        ways = [(a, b) for a, b in steps if 0 < a < size and 0 < b < size and grid[a][b] == WALL]
        if not ways:
            trail.pop()
            continue
        a, b = draws.choice(ways)
        grid[(r + a) // 2][(c + b) // 2] = grid[a][b] = FREE
        trail.append((a, b))
    return grid


def paths_from(grid: Grid, start: tuple[int, int]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return, for each reachable cell, the cell before it on its path from `start`."""
    before, front = {start: start}, [start]  # the start is its own predecessor, which ends a path
    for r, c in front:
        for cell in ((r, c + 1), (r + 1, c), (r, c - 1), (r - 1, c)):
            if grid[cell[0]][cell[1]] != WALL and cell not in before:
                before[cell] = (r, c)
                front.append(cell)
    return before


def _path(before: dict[tuple[int, int], tuple[int, int]], goal: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the path from the start to `goal`, both included."""
    way = [goal]
    while before[way[-1]] != way[-1]:
        way.append(before[way[-1]])
    return way[::-1]


def make_maze(size: int, length: int, draws: Random) -> tuple[Tensor, Tensor] | None:
    """Return a maze with S and G `length` steps apart and its solution, (size, size) each; None if it has no such cells."""
    grid = carve(size, draws)
    free = [(r, c) for r in range(size) for c in range(size) if grid[r][c] == FREE]
    before = paths_from(grid, start := draws.choice(free))
    ways = [way for goal in free if len(way := _path(before, goal)) == length + 1]
    if not ways:
        return None
    way = draws.choice(ways)
    maze = torch.tensor(grid)
    maze[start], maze[way[-1]] = START, GOAL
    solution = maze.clone()
    for cell in way[1:-1]:
        solution[cell] = PATH
    return maze, solution


def least_image(maze: Tensor) -> bytes:
    """Return the smallest of all images of a maze, as bytes: two mazes are images of each other if these are equal.

    Images are the eight rotations and reflections, each also with S and G exchanged.
    """
    swapped = torch.tensor([WALL, FREE, GOAL, START, PATH])[maze]
    images = [turned for m in (maze, swapped) for k in range(4) for turned in (m.rot90(k), m.rot90(k).T)]
    return min(bytes(image.flatten().tolist()) for image in images)


@lru_cache(maxsize=8)
def mazes(
    *,
    size: int = 9,
    train: int = 1_000,
    valid: int = 0,
    test: int = 200,
    lengths: tuple[int, int] | None = None,
    seed: int = 0,
) -> Dataset[Split]:
    """Generate perfect mazes: x (n, size^2) of `MAZE_TOKENS`, and y, the same with the path from S to G marked.

    The lengths of paths are uniform in their range. No two mazes are images of each other under rotation, reflection and
    exchange of S and G.

    size     side of a maze including its walls, odd
    lengths  range of the number of steps from S to G; None: from 4 to 3 * size
    """
    if size < 5 or size % 2 == 0:
        raise ValueError(f"size must be odd and at least 5, got {size}.")
    low, high = (4, 3 * size) if lengths is None else lengths
    draws, seen = Random(f"maze {size} {seed}"), set()
    found: list[tuple[Tensor, Tensor]] = []
    length, wanted = draws.randint(low, high), train + valid + test
    for _ in range(ATTEMPTS * wanted):
        if len(found) == wanted:
            break
        made = make_maze(size, length, draws)
        if made is None or (mark := least_image(made[0])) in seen:
            continue  # try the same length again: a new draw would make long paths, which few mazes have, rare
        seen.add(mark)
        found.append(made)
        length = draws.randint(low, high)
    if len(found) < wanted:
        raise ValueError(
            f"Only {len(found)} of {wanted} different mazes of size {size} with paths of {low} to {high} steps were found. "
            "Request fewer mazes, shorter paths or a larger size."
        )
    x, y = (torch.stack([entry[i] for entry in found]).flatten(1) for i in (0, 1))
    return cut(f"maze-{size}", Split(x, y), valid, test, MAZE_TOKENS)


def prefix_sums(*, length: int = 16, train: int = 2_000, valid: int = 0, test: int = 500, seed: int = 0) -> Dataset[Split]:
    """Generate bits x, (n, length), and the parity of each prefix, y[i] = x[0] + ... + x[i] modulo 2; no sequence twice."""
    wanted = train + valid + test
    if wanted > 2 ** min(length, 40):
        raise ValueError(f"There are only {2**length} sequences of {length} bits, got a request for {wanted}.")
    draws, seen = generator(seed, "prefix sums", length), set()
    rows: list[list[int]] = []
    while len(rows) < wanted:
        for row in torch.randint(2, (wanted, length), generator=draws).tolist():
            if (key := tuple(row)) not in seen and len(rows) < wanted:
                seen.add(key)
                rows.append(row)
    x = torch.tensor(rows)
    return cut("prefix-sums", Split(x, x.cumsum(dim=1) % 2), valid, test, ("0", "1"))


@dataclass(frozen=True)
class MazeSymmetry:
    """An augmentation that rotates or reflects every maze, and exchanges S and G in half of them."""

    size: int = 9

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Return (count, size^2 + 5): the source cell of every cell, then the new token of every token."""
        cells = torch.arange(self.size**2).view(self.size, self.size)
        images = torch.stack([turned.flatten() for k in range(4) for turned in (cells.rot90(k), cells.rot90(k).T)])
        names = torch.tensor([[WALL, FREE, START, GOAL, PATH], [WALL, FREE, GOAL, START, PATH]])
        source = images[torch.randint(len(images), (count,), generator=generator)]
        return torch.cat([source, names[torch.randint(2, (count,), generator=generator)]], dim=1)

    def __call__(self, x: Tensor, y: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        source, names = draws.split([self.size**2, len(MAZE_TOKENS)], dim=1)
        return names.gather(1, x.gather(1, source)), names.gather(1, y.gather(1, source))
