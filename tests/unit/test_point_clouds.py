"""Point-cloud diffusion: metrics beside independent results, schedules by their definition, data,
and bad input.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.footprint import causal_lm_shape, commit_bytes, rank_bytes
from ebbflow.core.store import Store
from ebbflow.training.errors import DataError, TrainingError
from ebbflow.training.gang import Gang
from ebbflow.training.workload import Cursor
from ebbflow.training.workload_loader import make_workload, prepare_data, workload_context
from ebbflow.tryout.trial import try_workload
from ebbflow.workloads.points import diffusion, point_data, point_metrics

SCIPY = json.loads(
    (Path(__file__).resolve().parents[1] / "golden" / "point_metrics.json").read_text()
)
SMALL = {
    "num_points": 16,
    "hidden": 16,
    "layers": 1,
    "heads": 2,
    "held_out_clouds": 4,
    "sampling_steps": 3,
}


def clouds_of(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(case["seed"])
    return tuple(torch.from_numpy(random.normal(size=(size, 3))) for size in case["points"])  # type: ignore[return-value]


@pytest.mark.parametrize("case", SCIPY["cases"], ids=lambda case: f"{case['points']}")
def test_chamfer_and_emd_are_those_of_scipy(case: dict[str, Any]) -> None:
    """tests/golden/point_metrics.json: scipy.spatial.cKDTree and
    scipy.optimize.linear_sum_assignment.
    """
    a, b = clouds_of(case)
    assert float(point_metrics.chamfer(a, b)) == pytest.approx(case["chamfer"], abs=1e-6)
    if case["emd"] is not None:
        assert point_metrics.exact_emd(a, b) == pytest.approx(case["emd"], abs=1e-6)
        upper, error = point_metrics.sinkhorn_emd(a, b)
        assert (
            case["emd"] - 1e-9 <= upper
            and upper - error - 1e-9 <= case["emd"]
            and error < 0.1 * upper
        )


def test_emd_is_the_best_of_all_assignments() -> None:
    a, b = clouds_of({"seed": 5, "points": [6, 6]})
    costs = torch.cdist(a, b).numpy()
    best = min(
        costs[np.arange(6), list(order)].mean() for order in itertools.permutations(range(6))
    )
    assert point_metrics.exact_emd(a, b) == pytest.approx(best, abs=1e-12)


def test_metrics_of_sets_are_those_computed_by_hand() -> None:
    points = torch.tensor([0.0, 1.0, 10.0, 0.4, 9.0, 30.0])[:, None, None] * torch.tensor(
        [1.0, 0.0, 0.0]
    )
    pairs = point_metrics.chamfer_rows(points, points)
    # made 0, 1, 10; real 0.4, 9, 30. Squared, both ways: 2·0.4², 2·1², 2·20²
    found = point_metrics.set_metrics(pairs, 3)
    assert found["mmd"] == pytest.approx((2 * 0.16 + 2 * 1 + 2 * 400) / 3, rel=1e-5)
    assert found["coverage"] == pytest.approx(2 / 3)  # 30 is the nearest of no made cloud
    # nearest of 0: 0.4 (real), of 1: 0.4 (real), of 10: 9 (real), of 0.4: 0 (made), of 9: 10
    # (made), of 30: 10 (made)
    assert found["one_nna"] == 0.0


@pytest.mark.parametrize("kind", ["cosine", "linear"])
@pytest.mark.parametrize("prediction", ["v", "epsilon"])
def test_a_perfect_denoiser_makes_the_clean_cloud(kind: str, prediction: str) -> None:
    schedule = diffusion.NoiseSchedule(kind, 100)
    assert torch.allclose(
        schedule.alpha**2 + schedule.sigma**2, torch.ones(100, dtype=torch.float64)
    )
    assert (
        schedule.alpha[0] > 0.98 and schedule.alpha[-1] < 0.1 and (schedule.alpha.diff() < 0).all()
    )
    random = torch.Generator().manual_seed(0)
    clean, noise = (torch.randn(2, 5, 3, generator=random, dtype=torch.float64) for _ in range(2))
    t = torch.tensor([3, 70])
    target = schedule.target(prediction, clean, noise, t)
    again = schedule.split(prediction, target, schedule.add_noise(clean, noise, t), t)
    assert all(
        torch.allclose(tensor, given) for tensor, given in zip(again, (clean, noise), strict=True)
    )

    def perfect(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        alpha, sigma = schedule.factors(t, x)
        return schedule.target(prediction, clean, (x - alpha * clean) / sigma, t)

    for sampler in ("ddim", "ddpm"):
        generators = [torch.Generator().manual_seed(number) for number in range(2)]
        settings: dict[str, Any] = {
            "prediction": prediction,
            "sampler": sampler,
            "steps": 10,
            "limit": 9.0,
        }
        assert torch.allclose(
            diffusion.sample(perfect, schedule, noise, generators, **settings), clean, atol=1e-6
        )


def test_ddpm_over_all_timesteps_has_the_variance_of_ho_et_al() -> None:
    """The posterior variance of equation 7, beta · (1 - kept before) / (1 - kept), seen with a
    clean cloud of zeros.
    """
    schedule = diffusion.NoiseSchedule("linear", 50)
    generators = [torch.Generator().manual_seed(number) for number in range(2)]
    seen: list[torch.Tensor] = []

    def keep(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        # The clean cloud is 0
        return schedule.target("v", torch.zeros_like(x), x / schedule.factors(t, x)[1], t)

    settings: dict[str, Any] = {"prediction": "v", "sampler": "ddpm", "steps": 50, "limit": 9.0}
    diffusion.sample(keep, schedule, torch.zeros(2, 40_000, 3), generators, **settings)
    kept = schedule.alpha**2
    beta = 1 - kept[-1] / kept[-2]
    assert float(seen[1].var()) == pytest.approx(
        float(beta * (1 - kept[-2]) / (1 - kept[-1])), rel=0.02
    )


def config_of(tmp_path: Path, **options: Any) -> RunConfig:
    workload = "ebbflow.workloads:PointCloudDiffusion"
    settings = {**SMALL, **options}
    return RunConfig(store=str(tmp_path / "store"), workload=workload, workload_options=settings)


def workload_of(config: RunConfig) -> Any:
    context = workload_context(config, Gang(), store=Store.open(config.store))
    return make_workload(config, replace(context, prepared=prepare_data(config, context)))


def test_a_sample_is_a_function_of_seed_sample_and_epoch(tmp_path: Path) -> None:
    workload = workload_of(config_of(tmp_path, synthetic_clouds=8))
    model = workload.model()
    whole = workload.next_batch(model, Cursor(0, 16))
    parts = [workload.next_batch(model, Cursor(first, 5)) for first in (0, 5, 10)]
    for number in range(4):
        assert torch.equal(torch.cat([part[number] for part in parts]), whole[number][:15])
    # Two epochs of eight clouds have other noise, but the same clouds
    first = whole.t[:8]
    second = whole.t[8:]
    assert not torch.equal(first, second) and sorted(whole.category[:8].tolist()) == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]
    assert whole.clean.mean(dim=1).abs().max() < 1e-6
    assert whole.clean.square().mean(dim=(1, 2)) == pytest.approx(np.ones(16), abs=1e-5)
    assert len(workload.next_batch(model, Cursor(3, 0)).clean) == 0


@pytest.mark.parametrize(
    "options", [{}, {"known_points": 6, "prediction": "epsilon"}, {"latents": 4, "sampler": "ddpm"}]
)
def test_examine_accepts_it(options: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(tmp_path, **options)
    context = workload_context(config, Gang(), store=Store.open(config.store))
    trial = try_workload(config, replace(context, prepared=prepare_data(config, context)))
    assert "chamfer_ratio" in trial.text and not trial.notes
    assert trial.shape is not None and trial.shape.weight_unit == "clouds"


def test_known_points_are_given_and_kept(tmp_path: Path) -> None:
    """Completion: the loss ignores what the denoiser says of known points, and sampling keeps them."""
    workload = workload_of(config_of(tmp_path, known_points=6))
    batch = workload.next_batch(torch.nn.Module(), Cursor(0, 3))
    seen: list[torch.Tensor] = []

    class Model(torch.nn.Module):
        def forward(
            self, x: torch.Tensor, t: torch.Tensor, category: torch.Tensor, known: int
        ) -> torch.Tensor:
            seen.append(x)
            spoiled = torch.zeros_like(x)
            spoiled[:, :known] = torch.nan
            return spoiled

    assert torch.isfinite(workload.loss(Model(), batch).sum)
    assert torch.equal(seen[0][:, :6], batch.clean[:, :6]) and not torch.equal(
        seen[0][:, 6:], batch.clean[:, 6:]
    )
    metrics = workload.evaluate(Model())
    assert all(np.isfinite(value) for value in metrics.values())
    picture = workload.pictures()["clouds"]
    assert (
        picture.startswith("<svg")
        and picture.endswith("</svg>")
        and "nan" not in picture
        and len(picture) < 20_000
    )


def write_ply(path: Path, points: np.ndarray, encoding: str) -> None:
    kinds = "property float x\nproperty float y\nproperty float z\nproperty uchar red\n"
    header = f"ply\nformat {encoding} 1.0\nelement vertex {len(points)}\n{kinds}element face 0\n"
    header += "property list uchar int vertex_indices\nend_header\n"
    if encoding == "ascii":
        body = "".join(f"{x} {y} {z} 7\n" for x, y, z in points).encode()
    else:
        if "little" in encoding:
            order = "<"
        else:
            order = ">"
        kind = np.dtype([(axis, f"{order}f4") for axis in "xyz"] + [("red", "u1")])
        body = np.array([(*point, 7) for point in points], dtype=kind).tobytes()
    path.write_bytes(header.encode() + body)


def write_folder(folder: Path, sizes: dict[str, int]) -> list[str]:
    """Files of all formats, in two categories and two splits."""
    folder.mkdir(exist_ok=True)
    rows = ["split,category,path"]
    random = np.random.default_rng(0)
    for number, (name, size) in enumerate(sizes.items()):
        points = random.normal(size=(size, 3)).astype(np.float32)
        if name.endswith(".npy"):
            np.save(folder / name, points)
        elif name.endswith(".npz"):
            np.savez(folder / name, points=points)
        else:
            write_ply(folder / name, points, name.partition(".")[0])
        assert np.allclose(point_data.read_cloud(folder / name), points, atol=1e-5)
        rows.append(f"{'test' if number % 3 == 2 else 'train'},{'ab'[number % 2]},{name}")
    (folder / "index.csv").write_text("\n".join(rows) + "\n")
    return rows


SIZES = {
    "1.npy": 40,
    "2.npz": 30,
    "3.npy": 20,
    "ascii.ply": 25,
    "binary_little_endian.ply": 50,
    "6.npy": 22,
}
SIZES["binary_big_endian.ply"] = 21


def test_a_folder_of_files_becomes_samples(tmp_path: Path) -> None:
    folder = tmp_path / "clouds"
    write_folder(folder, SIZES)
    config = config_of(tmp_path, path=str(folder), max_stored_points=35)
    workload = workload_of(config)
    batch = workload.next_batch(torch.nn.Module(), Cursor(0, 10))
    assert batch.clean.shape == (10, 16, 3) and set(batch.category.tolist()) == {0, 1}
    assert set(workload.evaluate(lambda x, *_: torch.zeros_like(x))) >= {"chamfer", "coverage"}
    before = prepare_data(config, workload_context(config, Gang(), store=Store.open(config.store)))[
        "fingerprint"
    ]
    np.save(folder / "1.npy", np.random.default_rng(9).normal(size=(40, 3)))
    after = prepare_data(config, workload_context(config, Gang(), store=Store.open(config.store)))[
        "fingerprint"
    ]
    assert before != after


def truncate(folder: Path, rows: list[str]) -> None:
    (folder / "1.npy").write_bytes((folder / "1.npy").read_bytes()[:100])


def spoil(folder: Path, rows: list[str]) -> None:
    np.save(folder / "3.npy", np.full((20, 3), np.nan))


def empty_a_class(folder: Path, rows: list[str]) -> None:
    (folder / "index.csv").write_text("\n".join([*rows, "test,chairs,3.npy"]))


def forget(folder: Path, rows: list[str]) -> None:
    (folder / "2.npz").unlink()


def rename_column(folder: Path, rows: list[str]) -> None:
    (folder / "index.csv").write_text("\n".join(["split,class,path", *rows[1:]]))


@pytest.mark.parametrize(
    ("damage", "options", "said"),
    [
        (
            truncate,
            {},
            r"1 of 7 clouds are unusable, 0 are allowed: .*index\.csv:2: .*1\.npy: cannot be "
            r"read.*fix: ",
        ),
        (spoil, {}, r"3\.npy: 20 of 20 points are not finite"),
        (forget, {}, r"index\.csv:3: .*2\.npz: No such file"),
        (empty_a_class, {}, r"category chairs has no usable cloud of split train.*fix: "),
        (
            rename_column,
            {},
            r"index\.csv:1: column category is missing; it has split, class, path; fix: ",
        ),
        (
            None,
            {"num_points": 24},
            r"1 of 5 clouds have fewer points than num_points asks for, 24; .*has 21; fix: ",
        ),
        (
            None,
            {"held_out_split": "val"},
            r"no row has split val; it has test, train; fix: workload_options\.held_out",
        ),
        (None, {"path": "no/such"}, r"no/such is not a folder; fix: "),
        (
            None,
            {"num_point": 24},
            r"workload_options\.num_point is unknown; fix: did you mean num_points\?",
        ),
        (None, {"num_points": "many"}, r"num_points: 'many' is a str; fix: a int"),
        (None, {"prediction": "x"}, r"prediction: 'x'; fix: v or epsilon"),
        (None, {"known_points": 16}, r"known_points: 16 of num_points 16 leaves no point"),
        (None, {"hidden": 15}, r"hidden: 15 is not a multiple of heads 2"),
        (None, {"layers": 0}, r"layers: 0; fix: at least 1"),
    ],
)
def test_bad_input_is_one_line_with_the_fix(
    damage: Callable[[Path, list[str]], None] | None,
    options: dict[str, Any],
    said: str,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "clouds"
    rows = write_folder(folder, SIZES)
    if damage is not None:
        damage(folder, rows)
    with pytest.raises(TrainingError, match=said) as caught:
        workload_of(config_of(tmp_path, **{"path": str(folder), **options}))
    assert "\n" not in str(caught.value) and not caught.value.curable


def test_bad_files_within_the_budget_are_skipped_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "clouds"
    write_folder(folder, SIZES)
    truncate(folder, [])
    config = config_of(tmp_path, path=str(folder), max_bad_files=1)
    prepared = prepare_data(
        config, workload_context(config, Gang(), store=Store.open(config.store))
    )
    assert prepared["skipped_count"] == 1 and "1.npy" in prepared["skipped"][0]
    assert "1 of 7 clouds are skipped" in capsys.readouterr().out


def test_partial_clouds_of_ones_own_are_the_known_points(tmp_path: Path) -> None:
    folder = tmp_path / "clouds"
    rows = write_folder(folder, SIZES)
    for number, row in enumerate(rows[1:], start=1):
        name = row.rpartition(",")[2]
        np.save(folder / f"part-{number}.npy", point_data.read_cloud(folder / name)[:9] + 100)
        rows[number] = f"{row},part-{number}.npy"
    (folder / "index.csv").write_text("\n".join([f"{rows[0]},partial", *rows[1:]]))
    workload = workload_of(config_of(tmp_path, path=str(folder), known_points=6))
    clean = workload.next_batch(torch.nn.Module(), Cursor(0, 5)).clean
    assert clean[:, :6].min() > 50 and clean[:, 6:].abs().max() < 10  # in the full cloud's scale
    with pytest.raises(
        DataError, match=r"fewer points than known_points asks for, 10; .*has 9; fix: "
    ):
        workload_of(config_of(tmp_path, path=str(folder), known_points=10))
    (folder / "index.csv").write_text(
        "\n".join([f"{rows[0]},partial", *rows[1:-1], rows[-1].rpartition(",")[0] + ","])
    )
    with pytest.raises(
        DataError, match=r"index\.csv:8: a value is empty; fix: split, category, path, partial"
    ):
        workload_of(config_of(tmp_path, path=str(folder), known_points=6))


def test_points_of_small_clouds_may_be_repeated(tmp_path: Path) -> None:
    folder = tmp_path / "clouds"
    write_folder(folder, SIZES)
    workload = workload_of(
        config_of(tmp_path, path=str(folder), num_points=45, short_clouds="repeat")
    )
    assert workload.next_batch(torch.nn.Module(), Cursor(0, 4)).clean.shape == (4, 45, 3)
    with pytest.raises(DataError, match="complete clouds"):
        point_data.PackedClouds(Store.open(str(tmp_path / "other")), "0" * 64, "train")


def test_an_average_of_the_weights_counts_as_memory_and_in_commits() -> None:
    """Four bytes of each parameter, beside 4 of the weight and 8 of AdamW's moments."""
    plain, averaged = (
        RunConfig.model_validate({"training": {"ema": decay}}) for decay in (None, 0.999)
    )
    shape = causal_lm_shape(plain.model)
    parameters = shape.parameters
    assert commit_bytes(averaged, shape) - commit_bytes(plain, shape) == 4 * parameters
    held = [rank_bytes(config, shape, ranks=1, samples=1) for config in (averaged, plain)]
    assert held[0].optimizer - held[1].optimizer == 4 * parameters
