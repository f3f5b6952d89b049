"""Generated puzzles: unique solutions, splits that are disjoint under symmetry, augmentations."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from equilibria.lab import data
from equilibria.lab.data.mazes import GOAL, PATH, START, WALL, least_image, paths_from
from equilibria.lab.data.sudoku import BOXES, make_board, peers, signature, solve_board, units


def brute_force(board: list[int]) -> int:
    """Return the number of solutions by brute force, cell by cell."""
    size = int(len(board) ** 0.5)
    if 0 not in board:
        return 1
    cell = board.index(0)
    taken = {board[peer] for peer in peers(size)[cell]}
    return sum(brute_force([*board[:cell], d, *board[cell + 1 :]]) for d in range(1, size + 1) if d not in taken)


@pytest.mark.parametrize("size", BOXES)
def test_every_board_has_one_solution_which_is_valid(size: int) -> None:
    sudoku = data.load("sudoku", size=size, train=6, test=4, givens=(size**2 // 3, size**2 // 2))
    for split in (sudoku.train, sudoku.test):
        for board, solution in zip(split.x.tolist(), split.y.tolist(), strict=True):
            assert all(sorted(solution[cell] for cell in unit) == list(range(1, size + 1)) for unit in units(size))
            assert all(given in (0, digit) for given, digit in zip(board, solution, strict=True))
            assert solve_board(board).solutions == 1 and solve_board(board).first == solution
            assert 0 in board


def test_the_solver_counts_as_brute_force_does() -> None:
    draws = Random(0)
    for _ in range(30):
        board, _ = make_board(4, 4, draws)
        for cell in draws.sample(range(16), 3):
            board[cell] = 0
        assert solve_board(board, limit=1_000).solutions == brute_force(board)
    assert solve_board([1, 1, *[0] * 14]).solutions == 0
    assert solve_board([0] * 16, limit=1_000).solutions == 288  # known
    board, _ = make_board(9, 22, draws)
    assert solve_board(board).guesses >= 0


@pytest.mark.parametrize("size", BOXES)
def test_a_symmetry_keeps_the_signature_the_rules_and_the_solution(size: int) -> None:
    sudoku = data.load("sudoku", size=size, train=4, test=2)
    symmetry, generator = data.SudokuSymmetry(size), torch.Generator().manual_seed(0)
    x, y = symmetry(sudoku.train.x, sudoku.train.y, symmetry.draw(4, generator))
    assert not torch.equal(x, sudoku.train.x)
    for board, solution, before in zip(x.tolist(), y.tolist(), sudoku.train.x.tolist(), strict=True):
        assert solve_board(board).first == solution
        assert signature(board) == signature(before)
    marks = [signature(board) for board in [*sudoku.train.x.tolist(), *sudoku.test.x.tolist()]]
    assert len(set(marks)) == len(marks)


def test_no_test_board_of_4x4_is_an_image_of_a_training_board() -> None:
    """Checked by brute force over all 128 symmetries of the cells and all permutations of digits."""
    sudoku = data.load("sudoku", size=4, train=60, test=30, givens=(4, 7))
    line_orders = [
        [2 * bands[i // 2] + insides[bands[i // 2]][i % 2] for i in range(4)]
        for bands in itertools.permutations(range(2))
        for insides in itertools.product(itertools.permutations(range(2)), repeat=2)
    ]
    moves = [
        [4 * r + c if not turned else 4 * c + r for r in rows for c in columns]
        for rows in line_orders
        for columns in line_orders
        for turned in (False, True)
    ]
    assert len({tuple(move) for move in moves}) == 128

    def image(board: list[int]) -> tuple[int, ...]:
        names: dict[int, int] = {0: 0}  # digits in the order of their first appearance
        return tuple(names.setdefault(digit, len(names)) for digit in board)

    train = {min(image([board[cell] for cell in move]) for move in moves) for board in sudoku.train.x.tolist()}
    test = {min(image([board[cell] for cell in move]) for move in moves) for board in sudoku.test.x.tolist()}
    assert len(train) == 60 and len(test) == 30 and not train & test


@pytest.mark.parametrize(
    ("name", "options", "mark"),
    [
        ("sudoku", {"size": 4, "givens": (4, 7)}, signature),
        ("mazes", {"size": 9}, lambda maze: least_image(torch.tensor(maze).view(9, 9))),
        ("prefix-sums", {"length": 8}, tuple),
    ],
)
def test_three_splits_are_disjoint_under_symmetry(name: str, options: dict[str, Any], mark: Callable[[Any], Any]) -> None:
    found = data.load(name, train=20, valid=8, test=12, **options)
    assert found.valid is not None and [len(found.train), len(found.valid), len(found.test)] == [20, 8, 12]
    marks = [mark(board) for split in (found.train, found.valid, found.test) for board in split.x.tolist()]
    assert len(set(marks)) == 40
    more = data.load(name, train=24, valid=8, test=12, **options)
    if name != "prefix-sums":  # drawn in one piece, whose size counts
        assert more.valid is not None
        assert torch.equal(more.test.x, found.test.x) and torch.equal(more.valid.x, found.valid.x)
    assert data.load(name, train=20, test=12, **options).valid is None


def test_sudoku_has_the_requested_difficulty_and_refuses_impossible_requests() -> None:
    hard = data.load("sudoku", size=6, train=4, test=2, givens=(8, 10), guesses=(1, 50))
    assert all(1 <= solve_board(board).guesses <= 50 for board in hard.train.x.tolist())
    with pytest.raises(ValueError, match=r"Only \d+ of \d+ different boards were found"):
        data.load("sudoku", size=4, train=60, test=1, givens=(4, 4))
    with pytest.raises(ValueError, match="size must be one of 4, 6, 9, got 5"):
        data.load("sudoku", size=5)
    same = data.load("sudoku", size=4, train=60, test=30, givens=(4, 7), seed=1)
    assert not torch.equal(same.train.x, data.load("sudoku", size=4, train=60, test=30, givens=(4, 7)).train.x)


def test_mazes_have_one_path_of_the_requested_length() -> None:
    mazes = data.load("mazes", size=9, train=20, test=10, lengths=(6, 16))
    lengths = set()
    for x, y in zip(mazes.train.x.view(-1, 9, 9), mazes.train.y.view(-1, 9, 9), strict=True):
        grid, free = x.tolist(), int((x != WALL).sum())
        start, goal = (tuple(map(int, (x == token).nonzero()[0])) for token in (START, GOAL))
        before = paths_from(grid, (start[0], start[1]))
        edges = sum(grid[r][c] != WALL and grid[r][c + 1] != WALL for r in range(9) for c in range(8))
        edges += sum(grid[r][c] != WALL and grid[r + 1][c] != WALL for r in range(8) for c in range(9))
        assert len(before) == free and edges == free - 1  # connected, and a tree: one path between any two cells
        cell, way = (goal[0], goal[1]), 0
        while before[cell] != cell:
            cell, way = before[cell], way + 1
        assert way == int((y == PATH).sum()) + 1 and 6 <= way <= 16
        lengths.add(way)
    assert len(lengths) > 3
    marks = [least_image(maze) for split in (mazes.train, mazes.test) for maze in split.x.view(-1, 9, 9)]
    assert len(set(marks)) == 30
    symmetry = data.MazeSymmetry(9)
    x, y = symmetry(mazes.train.x, mazes.train.y, symmetry.draw(20, torch.Generator().manual_seed(0)))
    assert not torch.equal(x, mazes.train.x)
    assert [least_image(maze) for maze in x.view(-1, 9, 9)] == marks[:20]
    assert torch.equal(torch.where(y == PATH, 1, y), x)


def test_mazes_and_prefix_sums_refuse_impossible_requests() -> None:
    with pytest.raises(ValueError, match="size must be odd"):
        data.load("mazes", size=8)
    with pytest.raises(ValueError, match="different mazes of size 5"):
        data.load("mazes", size=5, train=50, test=50, lengths=(6, 6))
    with pytest.raises(ValueError, match="There are only 16 sequences"):
        data.load("prefix-sums", length=4, train=20, test=5)
    sums = data.load("prefix-sums", length=6, train=30, test=20)
    everything = torch.cat([sums.train.x, sums.test.x]).tolist()
    assert len({tuple(row) for row in everything}) == 50
    assert sums.test.y[0].tolist() == [sum(sums.test.x[0, : i + 1].tolist()) % 2 for i in range(6)]
