"""A workload of one's own: found and measured before anything is paid for, and told in one line
what is wrong.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ebbflow.core.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    SchedulerConfig,
    TrainingConfig,
)
from ebbflow.core.events import read_events
from ebbflow.core.footprint import causal_lm_shape
from ebbflow.core.store import Store
from ebbflow.training.errors import DataError, WorkloadError
from ebbflow.training.gang import Gang
from ebbflow.training.workload_loader import prepare_data, workload_context
from ebbflow.tryout.examine import examine, main
from ebbflow.tryout.trial import Trial, try_evaluate, try_workload
from tests.support.alone import run_alone
from tests.support.workload_cases import Endless

ROOT = Path(__file__).resolve().parents[2]
CASES = "tests.support.workload_cases"

MODELS = [
    ModelConfig(hidden_size=64, num_layers=2, num_heads=4, sequence_length=64),
    ModelConfig(hidden_size=32, num_layers=3, num_heads=2, sequence_length=128, vocab_size=1000),
]


def config_of(name: str, tmp_path: Path, **settings: Any) -> RunConfig:
    if ":" in name:
        workload = name
    else:
        workload = f"{CASES}:{name}"
    return RunConfig(store=str(tmp_path / "store"), workload=workload, **settings)


def tried(config: RunConfig) -> Trial:
    """As one rank alone: data prepared, then tried."""
    context = workload_context(config, Gang(), store=Store.open(config.store))
    return try_workload(config, replace(context, prepared=prepare_data(config, context)))


def refusal(config: RunConfig) -> str:
    with pytest.raises(WorkloadError) as caught:
        tried(config)
    assert "\n" not in str(caught.value)
    assert (caught.value.outcome.exit_code, caught.value.curable) == (2, False)
    return str(caught.value)


@pytest.mark.parametrize("name", ["Sound", "factory"])
def test_a_sound_workload_is_measured(name: str, tmp_path: Path) -> None:
    shape = tried(config_of(name, tmp_path)).shape
    assert (shape.parameters, shape.largest_unit_parameters, shape.units) == (4 * 8 + 8 + 9, 40, 2)
    assert (shape.flops_per_sample, shape.tokens_per_sample, shape.weight_unit) == (
        240,
        1,
        "samples",
    )
    assert shape.kind == "measured"
    # Kept for backward: the four inputs, the hidden eight, and the difference that is squared; all
    # float32.
    assert shape.activation_bytes_per_sample == 4 * (4 + 8 + 1)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "Mean",
            r"loss must be a sum: a batch of weight 4 gives .* about twice as much, as of a "
            r"mean; fix: reduction=",
        ),
        (
            "OnTheCpu",
            r"0\.weight, 0\.bias, 1\.weight and 1 more of 4 tensors are not on the meta device",
        ),
        ("NoUnits", r"units\(\) is empty; fix:"),
        ("Overlapping", r"0\.0 is inside 0, which is a unit too; fix: units must not overlap"),
        ("Whole", r"units\(\) holds the model itself; fix:"),
        ("NoReset", r"module 0 \(Scale\) holds 'scale' but has no reset_parameters\(\); fix:"),
        ("Raises", r"workload_cases\.py:\d+: .*Raises\(context\) raised KeyError: 'width'"),
        (
            "NoLoss",
            r"workload_cases\.py:\d+: NoLoss has no method loss, flops; fix: a workload has "
            r"model, units",
        ),
        ("Unrepeatable", r"next_batch gives other samples for the same cursor"),
        ("Detached", r"the sum has no gradient; fix:"),
        ("NotANumber", r"loss: the sum is nan; fix: one finite number"),
        (
            "NoEvaluation",
            r"workload_cases\.py:\d+: .*NoEvaluation\.evaluate raised KeyError: 'accuracy'",
        ),
        ("NUMBER", r"is a int, which cannot be called; fix:"),
        ("Sond", r"has no 'Sond', which workload names; fix: did you mean Sound\?"),
        ("PrepareNeedsSelf", r"prepare is called on the class.*fix: write @classmethod"),
        ("PreparesNoJson", r"what prepare returns must be JSON.*fix:"),
        (
            "tests.support.nowhere:Sound",
            r"there is no module 'tests\.support\.nowhere'; looked in .* fix: PYTHONPATH=",
        ),
    ],
)
def test_a_workload_error_is_one_line_with_its_place(name: str, said: str, tmp_path: Path) -> None:
    found = refusal(config_of(name, tmp_path))
    assert re.search(said, found), found


def test_metrics_are_finite_numbers(tmp_path: Path) -> None:
    def evaluating(accuracy: float | str) -> RunConfig:
        return config_of("NoEvaluation", tmp_path, workload_options={"accuracy": accuracy})

    assert "evaluate gives accuracy" in tried(evaluating(0.5)).text
    assert "evaluate() must return one number for each name" in refusal(evaluating("good"))
    assert "evaluate: accuracy = nan; fix: finite numbers" in refusal(evaluating("nan"))


def test_an_evaluation_that_is_long_on_a_cpu_refuses_nothing(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGALRM)
    context = workload_context(
        config_of("Endless", tmp_path), Gang(), store=Store.open(str(tmp_path))
    )
    said = try_evaluate("Endless", Endless(context), nn.Linear(4, 1), seconds=0.1)
    assert said == "evaluate not tried to its end, because it takes longer than 0.1 s here"
    assert signal.getsignal(signal.SIGALRM) is before


def test_an_error_in_the_module_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text, said in (
        (
            "syntax_case",
            "x = 1\ny = (",
            "syntax_case.py:2: importing workload module syntax_case raised SyntaxError",
        ),
        (
            "import_case",
            "\n\nimport no_such_package_of_mine\n",
            "import_case.py:3: importing workload module",
        ),
    ):
        (tmp_path / f"{name}.py").write_text(text)
        assert said in refusal(config_of(f"{name}:Any", tmp_path))


def test_parameters_without_a_gradient_need_ddps_option(tmp_path: Path) -> None:
    ddp = ParallelConfig(mode="ddp")
    said = refusal(config_of("Branching", tmp_path, parallel=ddp))
    assert (
        "2.weight, 2.bias of 6 parameters got no gradient" in said
        and "find_unused_parameters" in said
    )
    assert "got no gradient" in tried(config_of("Branching", tmp_path)).text


def test_a_tied_parameter_is_counted_once_and_stays_in_one_unit(tmp_path: Path) -> None:
    shape = tried(config_of("Tied", tmp_path)).shape
    assert (shape.parameters, shape.largest_unit_parameters) == (40 + 20, 40)
    assert "embedding.weight and head.weight are one parameter" in refusal(
        config_of("TiedAcross", tmp_path)
    )
    assert (
        tried(
            config_of("TiedAcross", tmp_path, parallel=ParallelConfig(mode="ddp"))
        ).shape.parameters
        == 60
    )


def test_data_are_prepared_once_and_named_by_what_they_are(tmp_path: Path) -> None:
    config = config_of("WithData", tmp_path)
    context = workload_context(config, Gang(), store=Store.open(config.store))
    first = prepare_data(config, context)
    assert first["points"] == 4 and first["weight_unit"] == "points"
    assert prepare_data(config, context)["fingerprint"] == first["fingerprint"]
    assert context.store.get("points.bin") == b"1234"
    other = config.model_copy(update={"workload_options": {"points": 5}})
    assert (
        prepare_data(other, workload_context(other, Gang(), store=Store.open(config.store)))
        != first
    )
    assert tried(config).shape.weight_unit == "points"


def test_a_model_that_fits_no_memory_is_looked_at_without_it(tmp_path: Path) -> None:
    trial = tried(config_of("Huge", tmp_path))
    width = 2**15
    assert trial.shape.parameters == 5 * width + width * width + width + width + 1
    assert trial.shape.activation_bytes_per_sample == 4 * (4 + 2 * width + 1)
    assert "no numbers, because weights and gradients of 8.0 GiB exceed" in trial.text


def test_initial_weights_are_compared_before_the_start(tmp_path: Path) -> None:
    save_file({"0.weight": torch.zeros(8, 4)}, tmp_path / "w.safetensors")
    training = TrainingConfig(initial_weights=str(tmp_path / "w.safetensors"))
    assert "3 missing: 0.bias, 1.weight, 1.bias; fix" in refusal(
        config_of("Sound", tmp_path, training=training)
    )


def last_metrics(job: Store) -> dict[str, float]:
    return [event.data["metrics"] for event in read_events(job) if event.name == "evaluation"][-1]


def test_optimizer_and_buffers_go_on_exactly_and_other_data_do_not(tmp_path: Path) -> None:
    def config(steps: int, **options: int) -> RunConfig:
        schedule = SchedulerConfig(type="constant", warmup_steps=0)
        training = TrainingConfig(batch_size=4, max_steps=steps, scheduler=schedule)
        checkpoint = CheckpointConfig(interval_steps=3)
        cluster = ClusterConfig(nodes=1)
        settings = {
            "training": training,
            "checkpoint": checkpoint,
            "cluster": cluster,
            "workload_options": options,
        }
        return config_of("Counting", tmp_path, **settings)

    whole = run_alone(config(6), "whole")
    run_alone(config(3), "parts")
    assert run_alone(config(6), "parts").weights_sha256 == whole.weights_sha256
    metrics = [
        last_metrics(Store.open(str(tmp_path / "store" / "jobs" / job)))
        for job in ("whole", "parts")
    ]
    assert metrics[0] == metrics[1] and metrics[0]["passes"] == 6
    with pytest.raises(
        DataError, match=r"data_fingerprint .* fix: bring back the former data, workload_options"
    ):
        run_alone(config(8, points=5), "parts")


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        (
            "here",
            WorkloadError,
            r"workload_cases\.py:\d+: .*FailsLater\.evaluate raised IndexError: list index",
        ),
        ("a lost peer", RuntimeError, "^Connection closed by peer$"),
        ("in a library", TypeError, "not callable$"),
    ],
)
def test_only_a_mistake_in_the_users_own_line_is_not_worth_another_attempt(
    how: str, kind: type[Exception], said: str, tmp_path: Path
) -> None:
    schedule = SchedulerConfig(type="constant", warmup_steps=0)
    training = TrainingConfig(
        batch_size=4, max_steps=3, evaluation_interval_steps=1, scheduler=schedule
    )
    settings = {
        "training": training,
        "checkpoint": CheckpointConfig(interval_steps=3),
        "cluster": ClusterConfig(nodes=1),
    }
    config = config_of("FailsLater", tmp_path, workload_options={"how": how}, **settings)
    with pytest.raises(kind, match=said) as caught:
        run_alone(config, "job")
    assert getattr(caught.value, "curable", True) == (how != "here")


@pytest.mark.parametrize("model", MODELS)
def test_the_built_in_models_measurements_match_its_formulas(
    model: ModelConfig, tmp_path: Path
) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"{number} ebb and flow, " * 400)
    data = DataConfig(
        path=str(tmp_path), suffixes=[".txt"], held_out_fraction=0.3, held_out_samples=4
    )
    config = RunConfig(
        store=str(tmp_path / "store"), model=model, data=data, training=TrainingConfig(batch_size=4)
    )
    found = tried(config).shape
    formula = causal_lm_shape(model)
    for name in (
        "parameters",
        "largest_unit_parameters",
        "flops_per_sample",
        "tokens_per_sample",
        "units",
    ):
        assert getattr(found, name) == getattr(formula, name)
    # The formula counts an attention matrix, which the fused kernel does not keep, and the logits'
    # gradient.
    expected = formula.activation_bytes_per_sample + formula.logits_bytes_per_sample
    assert 0.5 * expected <= found.activation_bytes_per_sample <= 1.1 * expected


def test_a_child_process_examines_within_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WorkloadError, match=r"was not tried out within 0\.5 s; fix:"):
        examine(config_of("Hangs", tmp_path), prepare=False, seconds=0.5)
    found = examine(config_of("WithData", tmp_path), prepare=False)
    assert found.prepared is None and "once its data are prepared" in found.text
    assert not (tmp_path / "store").exists()
    monkeypatch.chdir(tmp_path)  # the child must find the project from anywhere
    found = examine(config_of("WithData", tmp_path), prepare=True)
    assert found.prepared["points"] == 4 and found.shape.parameters == 49


def test_the_command_prints_the_shape_or_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(ROOT / "examples" / "shapes.yaml"), "--set", f"store={tmp_path}"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["shape"]["parameters"] == 24_548
    command = [
        sys.executable,
        "-m",
        "training",
        "examine",
        *arguments,
        "--set",
        f"workload={CASES}:Mean",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert (
        done.returncode == 2
        and "must be a sum" in done.stderr
        and len(done.stderr.splitlines()) == 1
    )
