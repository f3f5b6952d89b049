"""The Perron-Frobenius value of a sparse matrix, with bounds on both sides."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

TOLERANCE = 1e-7  # relative gap between the bounds at which the iteration stops
WORK = 200_000_000  # largest number of multiplied entries, which takes a few seconds; it limits the iterations,
FEWEST, MOST = 200, 5_000  # but not below and not above these numbers
TINY = 1e-280  # lower limit of the vector's entries: the bounds hold for positive vectors


def perron_value(offsets: Tensor, columns: Tensor, values: Tensor, *, symmetric: bool = False) -> float:
    """Return an upper bound of the spectral radius of |A| for a square matrix A in CSR form.

    The value is the largest over the strongly connected components. No cycle leads through several components, so edges
    between them do not matter: a directed path has the value 0. Within a component, power iteration on |A| + c I does not
    oscillate, and for any x > 0 (Collatz and Wielandt)

        min_i (|A| x)_i / x_i  <=  value  <=  max_i (|A| x)_i / x_i.

    The upper bound is returned, so a contraction may rely on it. It is accurate to 1e-7, except in large graphs of large
    diameter, such as a long undirected path: there the iteration stops early, and the bound is up to 1e-3 too large.

    symmetric  True if the pattern of entries is symmetric; components are found faster then
    """
    if not bool(torch.isfinite(values).all()):
        raise ValueError("The edge weights are not all finite, so the matrix has no Perron-Frobenius value.")
    n = len(offsets) - 1
    rows = torch.arange(n, device=offsets.device).repeat_interleave(offsets.diff())
    component = connected_components(rows, columns, n) if symmetric else strong_components(offsets, columns)
    inside = (component[rows] == component[columns]) & (values != 0)
    if not bool(inside.any()):
        return 0.0
    # nodes in components without a cycle are dropped with their edges
    nodes, place = torch.cat([rows[inside], columns[inside]]).unique(return_inverse=True)
    row, column = place.chunk(2)
    _, owner = component[nodes].unique(return_inverse=True)
    starts = torch.cat([row.new_zeros(1), row.bincount(minlength=len(nodes)).cumsum(0)])
    return _iterate(starts, column, values[inside].abs().double(), owner)


def _iterate(offsets: Tensor, columns: Tensor, values: Tensor, owner: Tensor) -> float:
    """Return the largest upper bound over all components by power iteration; `owner`, (n,), is the component of a node."""
    count = int(owner.max()) + 1
    largest = float(values.max())  # weights of any magnitude are scaled to at most 1, so that TINY has one meaning
    values = values / largest
    x = values.new_ones(len(owner), 1)
    lower, upper = values.new_zeros(count), values.new_full((count,), float("inf"))
    for _ in range(max(FEWEST, min(MOST, WORK // len(values)))):
        image = embedding_bag(columns, x, offsets, mode="sum", per_sample_weights=values, include_last_offset=True)
        ratio = (image / x).squeeze(1)
        lower = lower.scatter_reduce(0, owner, ratio, "amin", include_self=False).maximum(lower)
        upper = upper.scatter_reduce(0, owner, ratio, "amax", include_self=False).minimum(upper)
        if float(upper.max() - lower.max()) <= TOLERANCE * float(upper.max()):
            break
        shift = (lower * upper).sqrt()  # a guess of the value; exact for a star from the start
        x = image + shift[owner].unsqueeze(1) * x
        size = x.new_zeros(count).scatter_reduce(0, owner, x.squeeze(1), "amax", include_self=False)
        x = (x / size[owner].unsqueeze(1)).clamp(min=TINY)
    return float(upper.max()) * largest


def connected_components(rows: Tensor, columns: Tensor, n: int) -> Tensor:
    """Return a number for each node, (n,), equal for nodes that edges connect in either direction.

    Every node takes the smallest number among its neighbours, and then the number of the node with that number, until
    nothing changes. The second step doubles the distance: a path of n nodes takes about log n rounds.
    """
    number = torch.arange(n, device=rows.device)
    while True:
        least = number.scatter_reduce(0, number[rows], number[columns], "amin")
        least = least[least][number]
        if torch.equal(least, number):
            return number
        number = least


def strong_components(offsets: Tensor, columns: Tensor) -> Tensor:
    """Return a number for each node, (n,), equal for nodes on a common cycle (Tarjan 1972), in one pass over the edges.

    The recursion is written as a loop with `path` as its stack: long paths exceed Python's recursion limit.
    """
    starts, heads = offsets.tolist(), columns.tolist()
    n = len(starts) - 1
    # found: the order in which nodes were reached, from 1. reach: the smallest such number that a node is known to reach.
    found, reach, component = [0] * n, [0] * n, [-1] * n
    cursor, open_nodes, count, components = starts[:-1], [], 0, 0
    for root in range(n):
        path = [] if found[root] else [root]
        while path:
            node = path[-1]
            if not found[node]:
                count += 1
                found[node] = reach[node] = count
                open_nodes.append(node)
            unseen = -1
            while cursor[node] < starts[node + 1] and unseen < 0:
                other = heads[cursor[node]]
                cursor[node] += 1
                if not found[other]:
                    unseen = other
                elif component[other] < 0:
                    reach[node] = min(reach[node], found[other])
            if unseen >= 0:
                path.append(unseen)
                continue
            path.pop()
            if path:
                reach[path[-1]] = min(reach[path[-1]], reach[node])
            if reach[node] == found[node]:  # no path leads back to an earlier node, so a component is complete
                while component[node] < 0:
                    component[open_nodes.pop()] = components
                components += 1
    return torch.tensor(component, dtype=torch.int64, device=offsets.device)
