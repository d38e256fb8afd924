"""The price table is our own, dated and sane in every line; a line that cannot be right is named."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

import ebbflow.cost.catalogue
from ebbflow.cost.catalogue import Catalogue, load_catalogue
from ebbflow.cost.errors import CatalogueError
from ebbflow.cost.prices.quote import StaticPrices

INSTANCES = Path(ebbflow.cost.catalogue.__file__).with_name("instances.csv")
GPUS = Path(ebbflow.cost.catalogue.__file__).with_name("gpus.csv")

BAD_LINES = {
    "gpu": ("g5.xlarge,A11G,1,22888,4,16,2.5,0", 11, "gpu: 'A11G' is not a GPU of gpus.csv"),
    "memory": ("g5.xlarge,A10G,1,22.9,4,16,2.5,0", 18, "gpu_memory_mib: '22.9' is not MiB"),
    "cells": ("g5.xlarge,A10G,1,22888", 1, "4 cells, expected 8"),
}


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue()


def test_every_type_is_sane(catalogue: Catalogue):
    assert len(catalogue.types) >= 30
    for kind in catalogue.types:
        assert kind.vcpu >= 4 and kind.ram_gib >= kind.gpu_count, kind.name
        for price in kind.on_demand.values():
            per_gpu = price.usd_per_hour / kind.gpu_count
            assert 0.3 < per_gpu < 25, f"{kind.name}: ${per_gpu} per GPU and hour"
        for quote in StaticPrices().spot(kind, "us-east-1"):
            assert 0.05 < quote.usd_per_hour < kind.on_demand["us-east-1"].usd_per_hour, kind.name
            assert kind.interruption_band("us-east-1") is not None, kind.name
            assert quote.kind == "estimated" and quote.source.startswith("on-demand recorded 20")
        on_demand = StaticPrices().on_demand(kind, "us-east-1")
        assert on_demand is None or (
            on_demand.kind,
            on_demand.age_hours(on_demand.observed + 7200),
        ) == ("recorded", 2)


def test_the_advisor_covers_regions_that_have_no_on_demand_price_on_record(catalogue: Catalogue):
    regions = set()
    for kind in catalogue.types:
        regions.update(kind.advice)
    assert {"us-east-1", "us-west-2", "eu-west-1", "ap-northeast-1"} <= regions
    assert catalogue["p3.2xlarge"].interruption_band("us-east-1") == 4
    assert catalogue["g5.xlarge"].interruption_band("us-east-2") == 2
    assert catalogue["g5.xlarge"].interruption_band("ap-east-2") is None
    assert not StaticPrices().spot(catalogue["g5.xlarge"], "us-east-2")
    assert StaticPrices().on_demand(catalogue["g5.xlarge"], "us-east-2") is None


def test_peaks_are_dense_and_sourced(catalogue: Catalogue):
    gpus = {kind.gpu.name: kind.gpu for kind in catalogue.types}
    for gpu in gpus.values():
        assert gpu.source and (gpu.bf16_tflops or gpu.note), gpu.name
        if gpu.bf16_tflops and gpu.fp32_tflops:
            assert 2 <= gpu.bf16_tflops / gpu.fp32_tflops <= 32, gpu.name
    # 624 is the sparse figure
    assert gpus["A100"].peak_flops("bfloat16") == gpus["A100"].peak_flops("float16") == 312e12
    assert gpus["T4"].peak_flops("bfloat16") is None  # Turing has no bfloat16 tensor cores
    assert gpus["T4"].peak_flops("float32") == 8.1e12 and gpus["T4"].peak_flops("float16") == 65e12


def test_known_lines(catalogue: Catalogue):
    p5 = catalogue["p5.48xlarge"]
    assert (p5.gpu.name, p5.gpu_count, p5.efa) == ("H100", 8, 32)
    assert str(p5.on_demand["us-east-1"].usd_per_hour) == "55.04"
    g5 = catalogue["g5.xlarge"]
    (spot,) = StaticPrices().spot(g5, "us-east-1")
    assert spot.usd_per_hour == Decimal("1.006") * Decimal("0.41")
    assert not catalogue["p5e.48xlarge"].on_demand
    assert not StaticPrices().spot(catalogue["g7.2xlarge"], "us-east-1")
    assert {kind.name.split(".")[0] for kind in catalogue.matching(["g5.", "p4"])} == {
        "g5",
        "p4d",
        "p4de",
    }


@pytest.mark.parametrize(
    ("line", "column", "message"),
    [
        ("us-east-1,g5.xlarge,free,2026-07-20", 21, "usd_per_hour: 'free' is not"),
        ("us-east-1,g5.xlarge,nan,2026-07-20", 21, "usd_per_hour: 'nan' is not"),
        ("us-east-1,g5.xlarge,1.006,July", 27, "recorded: 'July' is not a day"),
        ("us-west-2,g6.xlarge,1.006,2026-07-20", 1, "g6.xlarge is listed twice for us-west-2"),
    ],
)
def test_a_bad_on_demand_price_is_named_with_its_place(
    line: str, column: int, message: str, tmp_path: Path
):
    path = tmp_path / "on_demand.csv"
    path.write_text(
        f"region,name,usd_per_hour,recorded\nus-west-2,g6.xlarge,0.9,2026-07-20\n{line}\n"
    )
    with pytest.raises(CatalogueError) as error:
        load_catalogue(on_demand=path)
    assert str(error.value).startswith(f"{path}:3:{column}: ") and message in str(error.value)


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_with_its_place(name: str, tmp_path: Path):
    line, column, message = BAD_LINES[name]
    header = next(row for row in INSTANCES.read_text().splitlines() if not row.startswith("#"))
    path = tmp_path / "instances.csv"
    path.write_text(f"# comment\n{header}\n{line}\n")
    with pytest.raises(CatalogueError) as error:
        load_catalogue(path, GPUS)
    assert str(error.value).startswith(f"{path}:3:{column}: ") and message in str(error.value)


@pytest.mark.parametrize(
    ("line", "column", "message"),
    [
        ("us-east-1,g5.xlarge,59,5", 24, "interruption_band: '5' is not a band in 0 … 4"),
        ("us-east-1,g5.xlarge,120,4", 21, "savings_percent: '120' is not percent"),
        ("us-west-2,g6.xlarge,40,4", 1, "g6.xlarge is listed twice for us-west-2"),
    ],
)
def test_a_bad_line_of_the_advisor_is_named_with_its_place(
    line: str, column: int, message: str, tmp_path: Path
):
    path = tmp_path / "spot_advisor.csv"
    path.write_text(
        f"region,name,savings_percent,interruption_band\nus-west-2,g6.xlarge,47,4\n{line}\n"
    )
    with pytest.raises(CatalogueError) as error:
        load_catalogue(INSTANCES, GPUS, path)
    assert str(error.value).startswith(f"{path}:3:{column}: ") and message in str(error.value)


def test_a_type_listed_twice_and_a_table_without_lines(tmp_path: Path):
    path = tmp_path / "instances.csv"
    path.write_text(INSTANCES.read_text() + INSTANCES.read_text().splitlines()[-1] + "\n")
    with pytest.raises(CatalogueError, match="is listed twice"):
        load_catalogue(path, GPUS)
    path.write_text("# nothing\n")
    with pytest.raises(CatalogueError, match=r"instances\.csv:1:1: no header line"):
        load_catalogue(path, GPUS)
