"""Rows of numbers between the ranks of a gang: the same table on every rank, and deadlines."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ebbflow.training.gang import Gang
from ebbflow.training.launch.evidence import is_peer_loss_error
from tests.support.rank_threads import call_on_ranks


def test_gather_gives_every_rank_the_same_rows_in_rank_order_exchange_after_exchange() -> None:
    def gather(gang: Gang) -> list[list[tuple[float, ...]]]:
        return [gang.gather_numbers([gang.rank, number]) for number in range(50)]

    expected = [[(float(rank), float(number)) for rank in range(4)] for number in range(50)]
    assert call_on_ranks(4, gather) == [expected] * 4


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("length", [1, 16])
def test_gather_numbers_keeps_float64_values(ranks: int, length: int) -> None:
    rows = [
        tuple([rank, 0.1 * rank, math.inf, 2.0**53 - rank] * 4)[:length] for rank in range(ranks)
    ]
    if ranks == 1:
        assert Gang().gather_numbers(rows[0]) == rows
    else:
        assert call_on_ranks(ranks, lambda gang: gang.gather_numbers(rows[gang.rank])) == (
            [rows] * ranks
        )


def test_gather_numbers_returns_floats_for_truth_values() -> None:
    assert Gang().gather_numbers([True, False]) == [(1.0, 0.0)]
    for rows in call_on_ranks(2, lambda gang: gang.gather_numbers([gang.rank == 1])):
        assert rows == [(0.0,), (1.0,)]


@pytest.mark.parametrize(
    ("dtype", "length"),
    [(torch.float32, 1), (torch.int64, 3), (torch.bfloat16, 5), (torch.float64, 512)],
)
def test_gather_keeps_the_type_and_length_of_a_row(dtype: torch.dtype, length: int) -> None:
    rows = [torch.arange(length).to(dtype) + rank for rank in range(2)]
    tables: list[Any] = call_on_ranks(2, lambda gang: gang.gather(rows[gang.rank]))
    for table in tables:
        assert table.dtype == dtype
        assert torch.equal(table, torch.stack(rows))


def test_gather_of_a_rank_whose_peer_is_silent_fails_as_a_lost_peer() -> None:
    def gather(gang: Gang) -> object:
        if gang.rank == 0:
            return gang.gather_numbers([1.0])
        return None

    error, silent = call_on_ranks(2, gather, seconds=0.5)
    assert silent is None
    assert isinstance(error, RuntimeError)
    assert is_peer_loss_error(str(error)), error
