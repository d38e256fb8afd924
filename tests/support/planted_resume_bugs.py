"""What a script's own resume can lose, planted into tests/support/scripts/resumable.py: each with
what the doctor says.

name: (text of the script, its replacement, text that the doctor prints)
"""

from __future__ import annotations

# The same for other scripts. name: (script, its text, replacement, text that the doctor prints)
OTHERS = {
    "average in a dict": (
        "resumable_ema",
        '    ema = ck["ema"]\n',
        "",
        "ema (dict of tensors): it is not restored",
    ),
    "DDP optimizer": (
        "resumable_ddp",
        '        optimizer.load_state_dict(ckpt["optimizer"])\n',
        "",
        "optimizer (AdamW): its state is not restored",
    ),
    "DDP random states": (
        "resumable_ddp",
        'ckpt["rngs"][dist.get_rank()]',
        'ckpt["rngs"][0]',
        "torch: the random state is lost on rank 1",
    ),
    "DDP epoch": (
        "resumable_ddp",
        '        start_epoch = ckpt["epoch"] + 1\n',
        "",
        "epoch: the count starts anew",
    ),
}


def plant(script: str, name: str) -> str:
    """Return the text of the script with one bug."""
    if name in PLANTED:
        old, new = PLANTED[name][:2]
    else:
        old, new = OTHERS[name][1:3]
    assert script.count(old) == 1, name
    return script.replace(old, new)


def _load(name: str) -> str:
    return f'        {name}.load_state_dict(checkpoint["{name}"])\n'


PLANTED = {
    "optimizer": (_load("optimizer"), "", "optimizer (AdamW): its state is not restored"),
    "scheduler": (
        _load("scheduler"),
        "",
        "scheduler (CosineAnnealingLR): its state is not restored",
    ),
    "scaler": (_load("scaler"), "", "scaler (GradScaler): its state is not restored"),
    "average": (_load("average"), "", "average (AveragedModel): its state is not restored"),
    "torch": (
        '        torch.set_rng_state(checkpoint["rng"])\n',
        "",
        "torch: the random state is lost",
    ),
    "random": (
        '        random.setstate(checkpoint["random"])\n',
        "",
        "random: the random state is lost",
    ),
    "batches": (
        '        skip = checkpoint["batch"]\n',
        "",
        "other samples are read after a resume",
    ),
    "epoch": (
        '        start_epoch = checkpoint["epoch"]\n',
        "",
        "other samples are read after a resume",
    ),
    "step": (
        '        global_step = checkpoint["global_step"]\n',
        "",
        "global_step: the count starts anew",
    ),
    "a batch too few": (
        '"batch": number + 1',
        '"batch": number',
        "other samples are read after a resume",
    ),
    "a batch too many": (
        'skip = checkpoint["batch"]\n',
        'skip = checkpoint["batch"] + 1\n',
        "other samples are read after a resume",
    ),
    "statistics": (
        'model.load_state_dict(checkpoint["model"])',
        'model.load_state_dict({k: v for k, v in checkpoint["model"].items() if "running" not in '
        "k}, False)",
        "buffers of the model, such as BatchNorm's statistics, are lost",
    ),
    "sampler": (
        "        shuffle.manual_seed(epoch)\n",
        "",
        "other samples are read after a resume",
    ),
    "nothing": ("if os.path.exists(PATH):", "if False:", "nothing is resumed"),
}
