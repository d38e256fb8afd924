"""Distances between point clouds, and metrics that compare sets of clouds.

Conventions of PointFlow (Yang et al. 2019): the Chamfer distance adds the mean squared distances of
both directions. The earth mover's distance (EMD) is the mean distance of the best one-to-one
assignment.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_CHUNK_ELEMENTS = 2**24  # of a distance matrix that is held at once


def distances(a: Tensor, b: Tensor) -> Tensor:
    """Return the Euclidean distances `[…, n, m]` of points `[…, n, 3]` and `[…, m, 3]`."""
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")


def chamfer(a: Tensor, b: Tensor) -> Tensor:
    """Return the Chamfer distances `[…]` of clouds `[…, n, 3]` and `[…, m, 3]`."""
    squared = distances(a, b).square()
    return squared.amin(dim=-1).mean(dim=-1) + squared.amin(dim=-2).mean(dim=-1)


def chamfer_rows(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the Chamfer distances `[r, c]` of all pairs of clouds `[r, n, 3]` and `[c, m, 3]`."""
    step = max(1, _CHUNK_ELEMENTS // (rows.shape[1] * columns.shape[1]))
    parts = []
    for row in rows:
        parts.append(torch.cat([chamfer(row[None], part) for part in columns.split(step)]))
    if parts:
        return torch.stack(parts)
    return rows.new_zeros(0, len(columns))


def assign(costs: np.ndarray) -> np.ndarray:
    """Solve the assignment problem for a square cost matrix, and return the column of each row.

    The total cost is the lowest possible. Shortest augmenting paths with potentials: Jonker and
    Volgenant 1987, without their initialisation; O(n³).
    """
    size = len(costs)
    row_price = np.zeros(size)
    column_price = np.zeros(size + 1)
    owner = np.full(size + 1, -1)  # the row of each column; column `size` is the root of a path
    for row in range(size):
        owner[size] = row
        column = size
        best = np.full(size, np.inf)
        previous = np.full(size, size)
        done = np.zeros(size + 1, dtype=bool)
        while owner[column] >= 0:
            done[column] = True
            free = ~done[:size]
            reduced = costs[owner[column]] - row_price[owner[column]] - column_price[:size]
            better = free & (reduced < best)
            best[better] = reduced[better]
            previous[better] = column
            following = int(np.where(free, best, np.inf).argmin())
            step = best[following]
            row_price[owner[done]] += step
            column_price[done] -= step
            best[free] -= step
            column = following
        while column != size:
            owner[column] = owner[previous[column]]
            column = previous[column]
        owner[size] = -1
    result = np.empty(size, dtype=np.int64)
    result[owner[:size]] = np.arange(size)
    return result


def exact_emd(a: Tensor, b: Tensor) -> float:
    """Return the exact EMD of two clouds `[n, 3]` with the same number of points."""
    costs = distances(a.double(), b.double()).numpy(force=True)
    return float(costs[np.arange(len(costs)), assign(costs)].mean())


def sinkhorn_emd(
    a: Tensor, b: Tensor, *, strength: float = 0.01, rounds: int = 200
) -> tuple[float, float]:
    """Return an upper bound of the EMD of two clouds of the same size, and the bound's largest
    error.

    Sinkhorn's iteration on logarithms with an entropy of `strength` × the mean cost (Cuturi 2013;
    Peyré and Cuturi 2019, section 4.4). The plan is rounded to a feasible one (Altschuler et al.
    2017, algorithm 2), whose cost is the upper bound. The error is its distance to the dual value
    of the potentials, which is a lower bound.
    """
    costs = distances(a.double(), b.double())
    size = len(costs)
    scale = float(strength * costs.mean().clamp(min=1e-12))
    log_mass = -float(np.log(size))
    f = costs.new_zeros(size)
    g = costs.new_zeros(size)
    for _ in range(rounds):
        f = scale * (log_mass - torch.logsumexp((g[None] - costs) / scale, dim=1))
        g = scale * (log_mass - torch.logsumexp((f[:, None] - costs) / scale, dim=0))
    plan = torch.exp((f[:, None] + g[None] - costs) / scale)
    plan = plan * (1 / size / plan.sum(dim=1)).clamp(max=1)[:, None]
    plan = plan * (1 / size / plan.sum(dim=0)).clamp(max=1)[None]
    rows = 1 / size - plan.sum(dim=1)
    columns = 1 / size - plan.sum(dim=0)
    if float(rows.sum()) > 0:
        plan = plan + rows[:, None] * columns[None] / rows.sum()
    upper = float((plan * costs).sum())
    columns_price = (costs - f[:, None]).amin(dim=0)
    rows_price = (costs - columns_price[None]).amin(dim=1)
    return upper, max(0.0, upper - float(rows_price.mean() + columns_price.mean()))


def set_metrics(pairs: Tensor, made: int) -> dict[str, float]:
    """Compare generated clouds with real ones, from the distances of all pairs.

    Args:
        pairs: distances `[n, n]`, first those of the generated clouds.
        made: number of generated clouds.

    Returns:
        `mmd`: mean distance of a real cloud to the nearest generated one. `coverage`: share of the real
        clouds that are the nearest of a generated one. `one_nna`: accuracy of a nearest-neighbour
        classifier of generated and real clouds; 0.5 is best.
    """
    real_to_made = pairs[made:, :made]
    alone = pairs.clone()
    alone.fill_diagonal_(torch.inf)
    is_made = torch.arange(len(pairs), device=pairs.device) < made
    same = is_made[alone.argmin(dim=1)] == is_made
    return {
        "mmd": float(real_to_made.amin(dim=1).mean()),
        "coverage": len(set(real_to_made.argmin(dim=0).tolist())) / max(len(pairs) - made, 1),
        "one_nna": float(same.double().mean()),
    }
