"""Generated Sudoku boards of 4x4, 6x6 and 9x9 with unique solutions, no two of them equal up to the board's symmetries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

import torch
from torch import Tensor

from equilibria.lab.data.sets import Dataset, Split, cut

BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}  # rows and columns of a box, by the size of the board
Board = list[int]  # row by row; 0 is an empty cell
ATTEMPTS = 60  # boards drawn per requested board before the request fails
REFINEMENTS = 4  # rounds of the signature; more rounds do not distinguish more boards


@dataclass(frozen=True)
class Solved:
    """The result of the solver."""

    solutions: int  # at most the limit it was given
    first: Board | None
    guesses: int  # number of cells at which several digits were possible


@lru_cache
def peers(size: int) -> tuple[tuple[int, ...], ...]:
    """Return the other cells in the row, column and box of each cell."""
    return tuple(
        tuple(sorted({other for unit in units(size) if cell in unit for other in unit} - {cell})) for cell in range(size**2)
    )


@lru_cache
def units(size: int) -> tuple[tuple[int, ...], ...]:
    """Return the cells of every row, then of every column, then of every box."""
    height, width = BOXES[size]
    rows = [tuple(range(size * r, size * (r + 1))) for r in range(size)]
    columns = [tuple(range(c, size**2, size)) for c in range(size)]
    boxes = [
        tuple(size * (top + r) + left + c for r in range(height) for c in range(width))
        for top in range(0, size, height)
        for left in range(0, size, width)
    ]
    return (*rows, *columns, *boxes)


def solve_board(board: Board, limit: int = 2, order: Random | None = None) -> Solved:
    """Solve a board by backtracking at the cell with the fewest candidates; stops at `limit` solutions.

    order  generator that shuffles the digits before they are tried; None: ascending order
    """
    size = int(len(board) ** 0.5)
    whole = (1 << size) - 1  # digits as bits of an integer: sets are compared and counted in one operation
    allowed = [whole] * len(board)
    cells = list(board)
    for cell, digit in enumerate(board):
        if digit:
            if not allowed[cell] >> (digit - 1) & 1:
                return Solved(0, None, 0)
            for peer in peers(size)[cell]:
                allowed[peer] &= ~(1 << (digit - 1))
    found: list[Board] = []
    guesses = _search(cells, allowed, peers(size), found, limit, order)
    return Solved(len(found), found[0] if found else None, guesses)


def _search(
    cells: Board,
    allowed: list[int],
    near: tuple[tuple[int, ...], ...],
    found: list[Board],
    limit: int,
    order: Random | None,
) -> int:
    """Fill the empty `cells` and add solutions to `found`; returns the number of guesses.

    allowed  bit mask of the allowed digits of every cell; near: cells of the same row, column or box
    """
    # the cell with the fewest candidates first, which keeps the search tree small
    best, fewest = -1, 100  # more than any cell has candidates
    for cell, digit in enumerate(cells):
        if digit == 0:
            count = allowed[cell].bit_count()
            if count < fewest:
                best, fewest = cell, count
                if count <= 1:
                    break
    if best < 0:
        found.append(list(cells))
        return 0
    digits = [d for d in range(allowed[best].bit_length()) if allowed[best] >> d & 1]
    if order is not None:
        order.shuffle(digits)
    guesses = int(fewest > 1)
    for d in digits:
        changed = [peer for peer in near[best] if allowed[peer] >> d & 1]
        cells[best] = d + 1
        for peer in changed:
            allowed[peer] &= ~(1 << d)
        guesses += _search(cells, allowed, near, found, limit, order)
        cells[best] = 0
        for peer in changed:  # undone in place: copying the board would take most of the time
            allowed[peer] |= 1 << d
        if len(found) >= limit:
            break
    return guesses


def make_board(size: int, givens: int, draws: Random) -> tuple[Board, Board]:
    """Return a puzzle and its unique solution; digits are removed in random order as long as the solution stays unique.

    givens  number of givens at which removal stops; more remain if every further removal would allow a second solution
    """
    solution = solve_board([0] * size**2, 1, draws).first
    assert solution is not None
    board, left = list(solution), size**2
    for cell in draws.sample(range(size**2), size**2):
        if left <= givens:
            break
        kept, board[cell] = board[cell], 0
        if solve_board(board).solutions == 1:
            left -= 1
        else:
            board[cell] = kept
    return board, solution


def signature(board: Board) -> int:
    """Return a number that is invariant under the symmetries of the board.

    Boards with different signatures are not images of each other; boards with equal signatures may or may not be. Colours of
    cells are refined by the colours in their row, column, box and digit (Weisfeiler and Leman).
    """
    size = int(len(board) ** 0.5)
    lines = units(size)
    square = BOXES[size][0] == BOXES[size][1]  # only then does a transposed board have boxes of the same shape
    kinds = [0] * size + [0 if square else 1] * size + [2] * size
    groups = [(kind, line) for kind, line in zip(kinds, lines, strict=True)]
    digits = [[cell for cell, given in enumerate(board) if given == d] for d in range(1, size + 1)]
    colour = [int(given > 0) for given in board]
    for _ in range(REFINEMENTS):
        received: list[list[int]] = [[] for _ in board]
        for kind, line in [*groups, *((3, cells) for cells in digits)]:
            message = _hash((kind, *sorted(colour[cell] for cell in line)))  # sorted: the order of cells must not matter
            for cell in line:
                received[cell].append(message)
        colour = [_hash((own, *sorted(messages))) for own, messages in zip(colour, received, strict=True)]
    return _hash(tuple(sorted(colour)))


def _hash(values: tuple[int, ...]) -> int:
    """Return a hash of integers that is the same in every process, unlike Python's own."""
    mixed = 0xCBF29CE484222325
    for value in values:
        mixed = ((mixed ^ (value & 0xFFFFFFFFFFFFFFFF)) * 0x100000001B3 + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 29
    return mixed


def different_boards(size: int, givens: tuple[int, int], guesses: tuple[int, int], draws: Random) -> Iterator[Any]:
    """Yield (puzzle, solution, guesses) endlessly, or None for a board that was rejected.

    Rejected are boards with a signature that was seen before, and those whose guesses are out of range.
    """
    seen: set[int] = set()
    while True:
        board, solution = make_board(size, draws.randint(*givens), draws)
        hard, mark = solve_board(board).guesses, signature(board)
        new = mark not in seen and guesses[0] <= hard <= guesses[1]
        if new:
            seen.add(mark)
        yield (board, solution, hard) if new else None


@lru_cache(maxsize=8)
def sudoku(
    *,
    size: int = 9,
    train: int = 1_000,
    valid: int = 0,
    test: int = 200,
    givens: tuple[int, int] | None = None,
    guesses: tuple[int, int] = (0, 1_000_000),
    seed: int = 0,
) -> Dataset[Split]:
    """Generate Sudoku boards: x (n, size^2) holds the givens, with 0 for empty cells; y the solution, with digits from 1.

    No two boards of any split are images of each other under the symmetries of Sudoku: permutations of digits, of rows in
    bands, of columns in stacks, of bands and of stacks, and transposition if boxes are square.

    givens   range of the number of givens at which removal stops; None: half of the cells
    guesses  range of the guesses that a backtracking solver needs, a measure of difficulty
    """
    if size not in BOXES:
        raise ValueError(f"size must be one of {', '.join(map(str, BOXES))}, got {size}.")
    givens = (size**2 // 2, size**2 // 2) if givens is None else tuple(givens)  # type: ignore[assignment]
    boards = different_boards(size, givens, tuple(guesses), Random(f"sudoku {size} {seed}"))  # type: ignore[arg-type]
    wanted = train + valid + test
    found: list[tuple[Board, Board, int]] = []
    for _ in range(ATTEMPTS * wanted):
        if len(found) == wanted:
            break
        if (board := next(boards)) is not None:
            found.append(board)
    if len(found) < wanted:
        raise ValueError(
            f"Only {len(found)} of {wanted} different boards were found in {ATTEMPTS * wanted} draws. Request fewer boards, "
            f"or widen givens={givens} and guesses={guesses}."
        )
    x, y = (torch.tensor([entry[i] for entry in found]) for i in (0, 1))
    classes = (".", *map(str, range(1, size + 1)))
    return cut(f"sudoku-{size}", Split(x, y), valid, test, classes)


@dataclass(frozen=True)
class SudokuSymmetry:
    """An augmentation that applies a random symmetry of the board to puzzle and solution of every sample."""

    size: int = 9

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Return (count, size^2 + size + 1): the source cell of every cell, then the new digit of every digit from 0."""
        n, (height, width) = self.size, BOXES[self.size]
        rows, columns = _lines(count, n, height, generator), _lines(count, n, width, generator)
        source = rows.unsqueeze(2) * n + columns.unsqueeze(1)  # (count, n, n)
        if height == width:
            turned = torch.rand(count, 1, 1, generator=generator) < 0.5
            source = torch.where(turned, source.transpose(1, 2), source)
        names = torch.rand(count, n, generator=generator).argsort(dim=1) + 1
        return torch.cat([source.flatten(1), names.new_zeros(count, 1), names], dim=1)

    def __call__(self, x: Tensor, y: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        source, names = draws.split([self.size**2, self.size + 1], dim=1)
        return names.gather(1, x.gather(1, source)), names.gather(1, y.gather(1, source))


def _lines(count: int, size: int, thick: int, generator: torch.Generator) -> Tensor:
    """Return random permutations of lines, (count, size), that keep bands of `thick` lines together."""
    bands = torch.rand(count, size // thick, generator=generator).argsort(dim=1)
    inside = torch.rand(count, size // thick, thick, generator=generator).argsort(dim=2)
    return (bands.unsqueeze(2) * thick + inside).flatten(1)
