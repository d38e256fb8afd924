"""Libraries that are too large for CI, each with the real package.

pip install -c constraints.txt datasets timm torchvision mosaicml-streaming torchtitan deepspeed trl
pytest tests/soak/soak_integrations.py

Beside a torch for the CPU, PYTHONPATH=tests/support/cpu_torchvision lets the torchvision for CUDA
be imported.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.store import Store
from ebbflow.training.gang import Gang
from ebbflow.training.workload import Cursor
from ebbflow.training.workload_loader import workload_context
from ebbflow.tryout.examine import examine_script
from tests.gang.test_hugging_face import TIED, random_model, settings_for
from tests.support import attached_scripts
from tests.support.attached_scripts import (
    ROOT,
    attached,
    events_of,
    finish,
    interrupt,
    output,
    start,
)
from tests.support.flow import FlowRunner

pytestmark = [pytest.mark.flow, pytest.mark.timeout(1800)]


def test_rows_of_parquet_and_of_datasets_give_the_samples_of_json_lines(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    from ebbflow.workloads import HuggingFace

    random_model(TIED, tmp_path / "model")
    rows = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "data.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "splits")
    found = []
    for name in ("data.jsonl", "data.parquet", "saved", "splits"):
        settings = settings_for(tmp_path / "model", dataset=str(tmp_path / name))
        own = workload_context(settings, Gang(), store=Store.open(str(tmp_path / "store")))
        workload: Any = HuggingFace(replace(own, prepared=HuggingFace.prepare(own)))
        found.append(workload.next_batch(workload.model(), Cursor(3, 5)).inputs)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("name", ["hugging_face", "lightning_mlp"])
def test_trainers_resumed_on_fewer_ranks_promise_nothing_exact_and_their_plan_counts_ranks(
    name: str, tmp_path: Path
) -> None:
    if name == "lightning_mlp":
        libraries = ("lightning.pytorch",)
    else:
        libraries = ("accelerate", "peft", "transformers.trainer")
    script = attached(tmp_path, name)
    if name == "lightning_mlp":
        text = script.read_text()
        script.write_text(
            text.replace(
                "    max_epochs=3,",
                "    max_epochs=3,\n    devices=int(os.environ['LOCAL_WORLD_SIZE']),",
            )
        )
        script.write_text(
            "import os\nos.environ.setdefault('LOCAL_WORLD_SIZE', '1')\n" + script.read_text()
        )
    settings = RunConfig.model_validate(
        {"script": str(script), "script_args": ["0"], "cluster": {"nodes": 1}}
    )
    steps = examine_script(settings).shape.steps
    for ranks in (2, 1):
        if ranks == 1:
            (script.parent / "final.pt").unlink(missing_ok=True)
        processes = start(script, "0.1" if ranks == 2 else "0", ranks=ranks, libraries=libraries)
        if ranks == 2:
            interrupt(processes, script, 5, signal.SIGKILL)
            finish(processes, script, -signal.SIGKILL)
    finish(processes, script)
    two = settings.changed("cluster", processes_per_node=2)
    assert examine_script(two).shape.steps == -(-steps // 2)
    promises = [event.data for event in events_of(script) if event.name == "promise"]
    assert promises[0]["level"] == "bit for bit" and promises[-1]["level"] == "not exact", promises
    assert "a commit of 2 ranks was resumed on 1" in " ".join(promises[-1]["reasons"])


def test_shards_of_mosaicmls_writer_give_the_rows_that_were_written(tmp_path: Path) -> None:
    writer = pytest.importorskip(
        "streaming.base.format.mds.writer", reason="mosaicml-streaming is not installed"
    )
    import numpy as np
    from PIL import Image

    from ebbflow.workloads.readers.files import MosaicShards

    drawn = np.random.default_rng(0)
    columns = {
        "i": "int",
        "s": "str",
        "b": "bytes",
        "u8": "uint8",
        "f32": "float32",
        "j": "json",
        "a": "ndarray",
        "a2": "ndarray:float32",
        "a3": "ndarray:int16:2,3",
        "p": "png",
        "si": "str_int",
        "sf": "str_float",
    }
    rows = [
        {
            "i": n * 10**10 - 5,
            "s": "é" * n,
            "b": bytes(n % 7),
            "u8": np.uint8(n),
            "f32": np.float32(n / 3),
            "j": {"n": n},
            "a": drawn.integers(0, 9, (n % 3 + 1, 2)),
            "a2": drawn.random((2, n % 5 + 1), np.float32),
            "a3": drawn.integers(-5, 5, (2, 3)).astype(np.int16),
            "p": Image.new("RGB", (3, 2), (n, 1, 2)),
            "si": n**20,
            "sf": n / 7,
        }
        for n in range(100)
    ]
    with writer.MDSWriter(out=str(tmp_path / "data"), columns=columns, size_limit=4000) as shards:
        for row in rows:
            shards.write(row)
    found = MosaicShards(tmp_path / "data")
    assert len(found) == 100 and len(list((tmp_path / "data").glob("*.mds"))) > 5
    for number, row in enumerate(rows):
        read = found[number]
        assert read.pop("p").convert("RGB").tobytes() == row.pop("p").tobytes()
        for name, value in row.items():
            same = np.array_equal(read[name], value) and getattr(read[name], "dtype", 0) == getattr(
                value, "dtype", 0
            )
            assert same and type(read[name]) is type(value), (number, name)


def test_an_image_model_of_timm_survives_and_begins_with_timms_weights(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed")
    from PIL import Image

    from ebbflow.training.weights.load import initialise, materialise
    from ebbflow.workloads import ImageModel

    for name, level in (("dark", 40), ("light", 200)):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(40):
            Image.new("RGB", (48, 48), (level + number, level, 0)).save(
                tmp_path / "pictures" / name / f"{number}.png"
            )
    config = {
        "workload": "ebbflow.workloads:ImageModel",
        "workload_options": {
            "model": "vit_tiny_patch16_224",
            "dataset": str(tmp_path / "pictures"),
            "size": 224,
            "workers": 1,
        },
        "training": {
            "batch_size": 4,
            "max_steps": 12,
            "learning_rate": 1e-4,
            "scheduler": {"warmup_steps": 2},
        },
        "cluster": {"nodes": 1, "processes_per_node": 2},
        "checkpoint": {"interval": "steps", "interval_steps": 4},
    }
    settings = RunConfig.model_validate(config)
    workload: Any = ImageModel(
        workload_context(settings, Gang(), store=Store.open(str(tmp_path / "own")))
    )
    model = workload.model()
    materialise(model, "cpu")
    initialise(model, workload.model(), seed=settings.training.seed)
    torch.manual_seed(settings.training.seed)
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=2).state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())
    assert workload.flops(workload.next_batch(model, Cursor(0, 1))) == pytest.approx(7.5e9, rel=0.2)
    runner = FlowRunner(tmp_path / "flow")
    path = tmp_path / "images.yaml"
    path.write_text(json.dumps({**config, "store": runner.store}))
    whole = runner.run("run", "--config", str(path), "--job", "whole")
    killed = runner.run(
        "run", "--config", str(path), "--job", "killed", "--rehearse", "rank-kill@step:9"
    )
    assert whole.exit_code == killed.exit_code == 0, whole.output + killed.output
    assert killed.report["interruptions"] == 1
    assert whole.report["weights_sha256"] == killed.report["weights_sha256"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_deepspeed_engine_that_is_killed_and_told_to_leave_ends_bit_equal(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    # Importing deepspeed alone takes up to 30 s
    monkeypatch.setattr(attached_scripts, "_DEADLINE_SECONDS", 400)
    code = (
        (ROOT / "docs" / "script-deepspeed.md")
        .read_text()
        .partition("```python\n")[2]
        .partition("```")[0]
    )
    code = code.replace("init_distributed()", "init_distributed(dist_backend='gloo')")
    # without the extension, which would be compiled at the first start
    code = (
        "import time\nimport deepspeed\ndeepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = "
        f"False\n{code}"
    )
    code = code.replace("job.log(loss=loss)", "job.log(loss=loss); time.sleep(0.05)")
    code = code.replace('"stage": 2', f'"stage": {stage}') + (
        "weights = list(engine.module.parameters())\nwith "
        "deepspeed.zero.GatheredParameters(weights):\n    engine.global_rank or "
        "torch.save([one.detach().clone() for one in weights], 'final.pt')\n"
    )
    whole = tmp_path / "whole" / "train.py"
    stopped = tmp_path / "stopped" / "train.py"
    for script in (whole, stopped):
        script.parent.mkdir()
        script.write_text(code)
    undisturbed = start(whole, ranks=2, DS_ACCELERATOR="cpu")
    for step, number, exit_code in ((5, signal.SIGKILL, -signal.SIGKILL), (15, signal.SIGTERM, 75)):
        processes = start(stopped, ranks=2, DS_ACCELERATOR="cpu")
        interrupt(processes, stopped, step, number)
        finish(processes, stopped, exit_code)
    finish(start(stopped, ranks=2, DS_ACCELERATOR="cpu"), stopped)
    finish(undisturbed, whole)
    ours, expected = (torch.load(script.parent / "final.pt") for script in (stopped, whole))
    assert len(ours) == 4 and all(map(torch.equal, ours, expected))
    assert output(stopped).count("goes on from step") == 2


def test_trls_trainer_with_lora_that_is_killed_and_told_to_leave_ends_bit_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed")
    from safetensors.torch import load_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    # Importing trl alone takes up to 30 s
    monkeypatch.setattr(attached_scripts, "_DEADLINE_SECONDS", 400)
    rows = [
        f"Row {number}: {'wrath ' * (number % 7)}sing, goddess, {number * number}."
        for number in range(60)
    ]
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel()
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(
        rows,
        trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    torch.manual_seed(1)
    sizes: Any = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), eos_token_id=0, **sizes))
    code = (
        (ROOT / "docs" / "script-peft.md").read_text().split("```python\n")[2].partition("```")[0]
    )
    slow = "import time\ntrainer.model.register_forward_pre_hook(lambda *_: time.sleep(0.1))\n"
    whole = tmp_path / "whole" / "train.py"
    stopped = tmp_path / "stopped" / "train.py"
    for script in (whole, stopped):
        tokenizer.save_pretrained(script.parent / "model")
        model.save_pretrained(script.parent / "model")
        (script.parent / "rows.jsonl").write_text(
            "".join(json.dumps({"text": row}) + "\n" for row in rows)
        )
        script.write_text(
            code.replace("[])", "[], use_cpu=True)").replace(
                "trainer.train(", f"{slow}trainer.train("
            )
        )
    own: Any = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    finish(start(whole, **own), whole)
    for step, number, exit_code in ((5, signal.SIGKILL, -signal.SIGKILL), (10, signal.SIGTERM, 75)):
        processes = start(stopped, **own)
        interrupt(processes, stopped, step, number)
        finish(processes, stopped, exit_code)
        shutil.rmtree(stopped.parent / "output")
    finish(start(stopped, **own), stopped)
    ours, expected = (
        load_file(script.parent / "adapter" / "adapter_model.safetensors")
        for script in (stopped, whole)
    )
    assert len(ours) == 8 and ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) and ours[name].any() for name in expected)
    assert output(stopped).count("goes on from step") == 2
