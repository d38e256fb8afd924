"""The promise of an attached script is derived from the script: what it keeps besides the job's
state is saved, found, or harmless.

All scripts of a test run in one process, each once whole and once left in the middle and resumed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(700)  # sixty runs in one process, on a busy machine
ROOT = Path(__file__).resolve().parents[2]
HARNESS = ROOT / "tests" / "support" / "scripts" / "look_at_scripts.py"
LEFT_AT = 13

BEGIN = """
import collections, copy, hashlib, itertools, math, random
import numpy as np, torch, ebbflow
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0); random.seed(0); np.random.seed(0)
x = torch.randn(56, 6)
data = TensorDataset(x, x.sum(1, keepdim=True))
def digest(*states):
    parts = [t.detach().numpy().tobytes() for state in states for t in state.values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=8, shuffle=True)
def train_on(a, b, scale=1.0):
    loss = scale * nn.functional.mse_loss(model(a), b)
    opt.zero_grad(); loss.backward(); opt.step()
    return loss
"""
END = "\nprint('final', job.step, digest(model.state_dict()))\n"
PLAIN_LOOP = """
job = ebbflow.attach(model, opt)
for epoch in job.epochs(3, loader):
    for a, b in loader:
        {body}
"""


def loop(body: str, before: str = "", end: str = END) -> str:
    indented = body.strip().replace("\n", "\n        ")
    return BEGIN + before + PLAIN_LOOP.format(body=indented) + end


# What a script keeps: it must resume equal, and nothing may be said against it
EXACT = {
    "torch_generator": loop(
        "train_on(a + 0.1 * torch.randn(a.shape, generator=noise), b)",
        "noise = torch.Generator().manual_seed(3)\n",
    ),
    "numpy_generator": loop(
        "train_on(a, b, float(rng.random()))", "rng = np.random.default_rng(3)\n"
    ),
    "random_state_in_object": loop(
        "train_on(a, b, noise.draw())",
        "class Noise:\n"
        "    def __init__(self): self.rng = np.random.RandomState(3)\n"
        "    def draw(self): return float(self.rng.rand())\n"
        "noise = Noise()\n",
    ),
    "random_random_made_late": BEGIN
    + "def main():\n"
    + "    job = ebbflow.attach(model, opt)\n"
    + "    rng = random.Random(3)\n"
    + "    for a, b in job.batches(loader, epochs=3):\n"
    + "        train_on(a, b, rng.random())\n"
    + "    return job\n"
    + "job = main()\n"
    + END,
    "draw_between_attach_and_loop": BEGIN
    + "job = ebbflow.attach(model, opt)\n"
    + "picture = torch.randn(2, 6)\n"
    + "for a, b in job.batches(loader, epochs=3):\n"
    + "    train_on(a + 0.1 * torch.randn(a.shape), b)\n"
    + END,
    "running_mean_for_print": loop(
        "loss = train_on(a, b)\n"
        "running += loss.item(); seen += 1\n"
        "history.append(loss.item())\n"
        "if seen % 10 == 0:\n"
        "    print('mean', running / seen)",
        "running = 0.0; seen = 0; history = []\n",
    ),
    "own_counter_for_evaluation": loop(
        "train_on(a, b)\nstep += 1\nif step % 4 == 0:\n    evaluate()",
        "step = 0; best = 1e9\n"
        "def evaluate():\n"
        "    global best\n"
        "    model.eval()\n"
        "    with torch.no_grad(): best = min(best, float(model(x).mean()))\n"
        "    model.train()\n",
    ),
    "timer_and_progress": loop(
        "start = time.time(); loss = train_on(a, b)\n"
        "total += time.time() - start; last = loss\n"
        "print(f'{total:.1f} s, {float(last):.3f}')",
        "import time\ntotal = 0.0; last = None\n",
    ),
    "confusion_per_epoch": BEGIN
    + "job = ebbflow.attach(model, opt)\n"
    + "for epoch in job.epochs(3, loader):\n"
    + "    errors = torch.zeros(4)\n"
    + "    for a, b in loader:\n"
    + "        errors[0] += float(train_on(a, b)); errors[1] += 1\n"
    + "    print('errors', errors.sum())\n"
    + END,
    "buffer_outside_the_state_dict": loop(
        "train_on(a, b)",
        "class Scaled(nn.Module):\n"
        "    def __init__(self, inner):\n"
        "        super().__init__(); self.inner = inner\n"
        "        self.register_buffer('scale', torch.ones(1), persistent=False)\n"
        "    def forward(self, v):\n"
        "        v = self.inner(v)\n"
        "        if self.training: self.scale = 0.9 * self.scale + 0.1 * v.detach().abs().mean()\n"
        "        return v / self.scale\n"
        "model = Scaled(model)\n",
    ),
    "containers_given_to_attach": BEGIN
    + "memory = collections.deque(maxlen=40); ema = {k: v.clone() for k, v in model.state_dict().items()}\n"
    + "count = np.zeros(1)\n"
    + "job = ebbflow.attach(model, opt, memory=memory, ema=ema, count=count)\n"
    + "for a, b in job.batches(loader, epochs=3):\n"
    + "    memory.extend(zip(a, b)); count += 1\n"
    + "    picked = [memory[k] for k in torch.randint(len(memory), (8,)).tolist()]\n"
    + "    train_on(torch.stack([p[0] for p in picked]), torch.stack([p[1] for p in picked]), 1 / count[0])\n"
    + "    for k, v in model.state_dict().items(): ema[k].mul_(0.9).add_(v, alpha=0.1)\n"
    + "print('final', job.step, digest(model.state_dict(), ema), len(memory))\n",
    "rows_of_an_array_in_an_own_loop": BEGIN
    + "table = x.numpy(); order = np.random.default_rng(5)\n"
    + "job = ebbflow.attach(model, opt)\n"
    + "for epoch in job.epochs(3):\n"
    + "    rows = order.permutation(len(table))\n"
    + "    for start in range(0, len(rows), 8):\n"
    + "        a = torch.from_numpy(table[rows[start:start + 8]])\n"
    + "        job.log(loss=train_on(a, a.sum(1, keepdim=True)))\n"
    + END,
    "gradients_accumulated_in_an_own_loop": BEGIN
    + "job = ebbflow.attach(model, opt)\n"
    + "for epoch in job.epochs(3):\n"
    + "    for part, (a, b) in enumerate(zip(x.split(4), x.sum(1, keepdim=True).split(4))):\n"
    + "        nn.functional.mse_loss(model(a), b).backward()\n"
    + "        if part % 2: opt.step(); opt.zero_grad()\n"
    + END,
    "values_of_the_job": BEGIN
    + "job = ebbflow.attach(model, opt)\n"
    + "saved = job.state(it=0, best=float('inf'), losses=[])\n"
    + "for a, b in job.batches(loader, epochs=3):\n"
    + "    for g in opt.param_groups: g['lr'] = 1e-2 * 0.9 ** saved.it\n"
    + "    loss = float(train_on(a, b, 1.0 if saved.best > 1 else 0.5))\n"
    + "    saved.it += 1; saved.best = min(saved.best, loss); saved.losses.append(loss)\n"
    + "print('final', job.step, digest(model.state_dict()), saved.it, saved.best, len(saved.losses))\n",
}
TRAINER = """
import hashlib, os, torch
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from ebbflow.integrations.transformers import CommitCallback
torch.manual_seed(0); x = torch.randn(56, 6)
class Net(nn.Module):
    def __init__(self): super().__init__(); self.f = nn.Linear(6, 1)
    def forward(self, v, labels=None):
        p = self.f(v); return {"loss": ((p - labels) ** 2).mean(), "logits": p}
rows = [{"v": row, "labels": row.sum().view(1)} for row in x]
class Constant(Trainer):  # its metric never improves
    def evaluate(self, *a, **k):
        m = {"eval_loss": 1.0, "epoch": self.state.epoch}; self.log(dict(m))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, m)
        return m
args = TrainingArguments(
    f"output-{os.environ['EBBFLOW_JOB']}", report_to=[], use_cpu=True, disable_tqdm=True,
    per_device_train_batch_size=8, num_train_epochs=4, eval_strategy="steps", eval_steps=3,
    save_strategy="steps", save_steps=3, load_best_model_at_end=True, metric_for_best_model="loss")
trainer = Constant(model=Net(), args=args, train_dataset=rows, eval_dataset=rows[:8],
    callbacks=[CommitCallback(), {callback}])
trainer.train(resume_from_checkpoint=CommitCallback.restore(trainer))
weights = trainer.model.f.weight.detach().numpy().tobytes()
print("final", trainer.state.global_step, hashlib.sha256(weights).hexdigest()[:12])
"""
EXACT["trainer_with_early_stopping"] = TRAINER.replace("{callback}", "EarlyStoppingCallback(4)")
# What a script keeps and the job does not: the promise must name it
NOT_EXACT = {
    "replay_list": (
        loop(
            "memory.append((a, b)); c, d = memory[int(torch.randint(len(memory), (1,)))]\n"
            "train_on(c, d)",
            "memory = []\n",
        ),
        "memory",
    ),
    "counter_for_the_learning_rate": (
        loop(
            "for g in opt.param_groups: g['lr'] = 1e-2 * 0.9 ** it\ntrain_on(a, b); it += 1",
            "it = 0\n",
        ),
        "it",
    ),
    "counter_through_a_function": (
        loop(
            "set_rate(rate(it)); train_on(a, b); it = it + 1",
            "it = 0\n"
            "def rate(n): return 1e-2 / (1 + n)\n"
            "def set_rate(value):\n"
            "    for g in opt.param_groups: g['lr'] = value\n",
        ),
        "it",
    ),
    "loss_weight_from_a_mean": (
        loop(
            "loss = train_on(a, b, 1.0 / (1.0 + mean))\nmean = 0.9 * mean + 0.1 * loss.item()",
            "mean = 0.0\n",
        ),
        "mean",
    ),
    "early_stopping_by_hand": (
        loop(
            "loss = train_on(a, b).item()\n"
            "patience = 0 if loss < best else patience + 1\n"
            "best = min(best, loss)\n"
            "if patience > 500: break",
            "best = 1e9; patience = 0\n",
        ),
        "best",
    ),
    "averaged_weights_in_a_dict": (
        loop(
            "train_on(a, b)\n"
            "for k, v in model.state_dict().items(): ema[k] = 0.9 * ema[k] + 0.1 * v.detach()",
            "ema = {k: v.clone() for k, v in model.state_dict().items()}\n",
            "\nprint('final', job.step, digest(ema))\n",
        ),
        "ema",
    ),
    "averaged_model_not_given": (
        loop(
            "train_on(a, b)\n"
            "with torch.no_grad():\n"
            "    for p, q in zip(average.parameters(), model.parameters()): p.lerp_(q, 0.1)",
            "average = copy.deepcopy(model)\n",
            "\nprint('final', job.step, digest(average.state_dict()))\n",
        ),
        "average",
    ),
    "scheduler_not_given": (
        loop(
            "train_on(a, b); schedule.step()",
            "schedule = torch.optim.lr_scheduler.StepLR(opt, 3, 0.5)\n",
        ),
        "schedule",
    ),
    "prefetched_batch": (
        BEGIN
        + "def get_batch():\n"
        + "    i = torch.randint(len(x), (8,)); return x[i], x[i].sum(1, keepdim=True)\n"
        + "job = ebbflow.attach(model, opt)\n"
        + "X, Y = get_batch()\n"
        + "for step in job.steps(21):\n"
        + "    train_on(X, Y)\n"
        + "    X, Y = get_batch()\n"
        + END,
        "X",
    ),
    "attribute_of_the_scripts_own_class": (
        BEGIN
        + "class Trainer:\n"
        + "    def __init__(self): self.count = 0\n"
        + "    def rate(self): return 1e-2 * 0.9 ** self.count\n"
        + "    def fit(self):\n"
        + "        self.job = ebbflow.attach(model, opt)\n"
        + "        for a, b in self.job.batches(loader, epochs=3):\n"
        + "            for g in opt.param_groups: g['lr'] = self.rate()\n"
        + "            train_on(a, b); self.count += 1\n"
        + "        return self.job\n"
        + "job = Trainer().fit()\n"
        + END,
        "self.count",
    ),
    "generator_function_of_batches": (
        BEGIN
        + "def forever():\n"
        + "    number = 0\n"
        + "    while True:\n"
        + "        yield x[number % 48:number % 48 + 8]; number += 1\n"
        + "job = ebbflow.attach(model, opt)\n"
        + "batches = forever()\n"
        + "for step in job.steps(21):\n"
        + "    a = next(batches); train_on(a, a.sum(1, keepdim=True))\n"
        + END,
        "batches",
    ),
    "trainer_with_a_counter_in_a_callback": (
        TRAINER.replace("{callback}", "Patience()").replace(
            "rows =",
            "class Patience(TrainerCallback):\n"
            "    def __init__(self): self.left = 15\n"
            "    def on_step_end(self, args, state, control, **_):\n"
            "        self.left -= 1; control.should_training_stop |= self.left == 0\n"
            "rows =",
        ),
        "Patience.left",
    ),
    "counter_in_an_averaging_module": (
        BEGIN
        + "class Average(nn.Module):\n"
        + "    def __init__(self, m):\n"
        + "        super().__init__(); self.m = copy.deepcopy(m); self.updates = 0\n"
        + "    def update(self, m):\n"
        + "        self.updates += 1; d = 0.99 * (1 - math.exp(-self.updates / 10))\n"
        + "        with torch.no_grad():\n"
        + "            for p, q in zip(self.m.parameters(), m.parameters()): p.mul_(d).add_(q, alpha=1 - d)\n"
        + "average = Average(model)\n"
        + "job = ebbflow.attach(model, opt, average=average)\n"
        + "for a, b in job.batches(loader, epochs=3):\n"
        + "    train_on(a, b); average.update(model)\n"
        + "print('final', job.step, digest(average.state_dict()))\n",
        "average.updates",
    ),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Each script's results: whole, and left and resumed."""
    folder = tmp_path_factory.mktemp("scripts")
    sources = {**EXACT, **{name: source for name, (source, _) in NOT_EXACT.items()}}
    words = []
    for name, source in sources.items():
        path = folder / f"{name}.py"
        path.write_text(source)
        words += [str(path), f"{path}:{LEFT_AT}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["EBBFLOW_RUNS"] = str(folder / "runs")
    done = subprocess.run(
        [sys.executable, str(HARNESS), str(folder / "store"), *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[dict[str, Any]]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            result = json.loads(line)
            found.setdefault(result["script"], []).append(result)
    return found


@pytest.mark.parametrize("name", EXACT)
def test_what_is_saved_or_harmless_is_promised_and_equal(
    results: dict[str, list[dict[str, Any]]], name: str
) -> None:
    (whole, resumed) = results[name]
    steps = 15 if name == "trainer_with_early_stopping" else 21
    assert whole["printed"].startswith(f"final {steps} ")
    assert resumed["printed"] == whole["printed"]
    for result in (whole, resumed):
        assert result["promise"]["level"] == "bit for bit", result["promise"]
        assert result["promise"]["reasons"] == []


@pytest.mark.parametrize("name", NOT_EXACT)
def test_what_changes_and_is_not_saved_is_named_with_the_fix(
    results: dict[str, list[dict[str, Any]]], name: str
) -> None:
    (whole, resumed) = results[name]
    variable = NOT_EXACT[name][1]
    for result in (whole, resumed):
        assert result["promise"]["level"] == "not exact", result["promise"]
        said = " ".join(result["promise"]["reasons"])
        assert f"`{variable}` ({name}.py:" in said and "changes and is not saved; fix: " in said


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("for epoch in job.epochs(3):\n    model(x)\n", "no step was counted in epoch 0"),
        ("for a in job.batches(iter([x]), epochs=2): train_on(a, a[:, :1])\n", "can be read once"),
        (
            "for epoch in job.epochs(2, zip(x, x)):\n    pass\n",
            "2 epochs of a zip, which can be read once",
        ),
    ],
)
def test_what_cannot_be_counted_is_refused_with_the_fix(
    tmp_path: Path, body: str, words: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(BEGIN + "job = ebbflow.attach(model, opt)\n" + body)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "EBBFLOW__STORE": str(tmp_path / "store")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode not in (0, 75), done.stdout
    (line,) = [line for line in done.stderr.splitlines() if words in line]
    assert "; fix: " in line and "Traceback" not in done.stderr


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ebbflow", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "EBBFLOW_RUNS": str(folder / "runs")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_script_that_does_not_attach_is_watched_and_billed_and_accused_of_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text("import time; time.sleep(1); print('trained')\n")
    refused = command(tmp_path, "run", "train.py", "--set", "cluster.nodes=2")
    assert refused.returncode == 2 and "fix: ebbflow run train.py --nodes 2" in refused.stderr
    done = command(tmp_path, "run", "train.py", "--set", f"store={tmp_path / 'runs'}")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[1] == (
        "ebbflow: train.py does not call ebbflow.attach: watched and billed, nothing is saved"
    )
    assert "trained" in said
    report = json.loads(command(tmp_path, "report", "train", "--json").stdout)
    assert report["outcome"] == "completed" and report["actual"]["goodput"] is None
    classes = {line["class"]: line["rank_seconds"] for line in report["ledger"]}
    assert classes["script"] >= 1.0
    assert classes.get("unattributed", 0.0) < 0.5
    text = command(tmp_path, "report", "train").stdout
    for word in ("DAMAGED", "interrupted", "bit for bit", "diagnosis"):
        assert word not in text
    assert " done " in command(tmp_path, "jobs").stdout
