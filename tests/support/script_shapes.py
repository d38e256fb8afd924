"""Small scripts with `ebbflow.attach` that keep something besides their model: whole shapes of what
users write. Each prints `final STEP DIGEST` at its end.

In EXACT all of it is saved, found, or harmless; in NOT_EXACT the named variable changes the result.
"""

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
