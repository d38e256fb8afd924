"""The benchmarks of savers, uploads and watching at a tiny size: they compare like with like.

No time is judged.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gang.test_bench import assert_measured, assert_told, run_bench


def test_every_saver_saves_and_restores_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = run_bench(
        tmp_path, "checkpoint", "--parts", "stall", "--rounds", "2", "--megabytes", "2"
    )
    checkpoint = figures["checkpoint"]
    savers = checkpoint["contestants"]
    assert sorted(savers) == [
        "dcp_async_fresh",
        "dcp_async_save",
        "dcp_process",
        "dcp_save",
        "engine",
    ]
    assert 1e6 < checkpoint["bytes"] < 4e6
    for saver in savers.values():
        assert saver["saves"] == 4, "two rounds, after two that warm up"
        assert saver["first_blocked_seconds"] > 0.0
    for name in ("engine", "dcp_save"):
        assert savers[name]["restored_equal"] is True
    assert assert_measured(checkpoint, rounds=2) == 1 + 4 * len(savers) + 2 * 2
    assert_told(figures, capsys.readouterr().out)


def test_uploads_are_compared_with_bare_puts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        "--parts",
        "upload,ranks",
        "--rounds",
        "1",
        "--bucket-megabytes",
        "8",
        "--simulated-ranks",
        "20",
    )
    figures = run_bench(tmp_path, "checkpoint", *arguments)
    places = figures["checkpoint"]["upload"]
    assert set(places) == {"null sink", "Swift"}
    for found in places.values():
        if isinstance(found, str):
            assert found.startswith("not measured: ")
            continue
        assert {"raw_obstore", "raw_sockets", "engine", "engine_upload"} <= set(
            found["contestants"]
        )
        assert assert_measured(found, rounds=1) == 3 * len(found["contestants"])
        upload = found["contestants"]["engine_upload"]
        save = found["contestants"]["engine"]
        assert upload["bytes_per_second"]["low"] > save["bytes_per_second"]["low"], (
            "it is a part of the save"
        )
        assert 0.0 < upload["cpu_seconds_per_gb"]["median"] < save["cpu_seconds_per_gb"]["median"]
        assert max(row["over_raw_limit"]["median"] for row in found["contestants"].values()) >= 1.0
        assert set(found["left_out"]) | set(found["contestants"]) >= {
            "dcp_s3torchconnector",
            "dcp_s3fs",
        }
    assert set(figures["checkpoint"]["many_ranks"]["worlds"]) == {"16", "20"}
    assert_told(figures, capsys.readouterr().out)


def test_what_being_watched_costs_is_measured_beside_the_bare_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = run_bench(tmp_path, "overhead", "--rounds", "4", "--step-milliseconds", "2")
    contestants = figures["contestants"]
    assert sorted(contestants) == ["bare", "guarded", "watched", "watched_gloo"]
    for found in contestants.values():
        assert found["step_seconds"]["rounds"] == 4 and found["step_seconds"]["low"] >= 0.002
    assert (
        contestants["bare"]["share_of_step"]["median"]
        == contestants["bare"]["step_sync_seconds"]["median"]
        == 0.0
    )
    for name in ("watched", "watched_gloo", "guarded"):
        assert (
            contestants[name]["step_sync_seconds"]["low"]
            > contestants[name]["beats_seconds"]["low"]
            > 0.0
        )
        assert contestants[name]["processor_seconds"] > 0.0
    assert contestants["guarded"]["guards_seconds"]["median"] > 0.0
    assert {"heartbeat_beat", "step_sync", "guards"} <= set(figures["parts"])
    out = capsys.readouterr().out
    assert "measured" in out and "heartbeat, step sync and guards" in out
