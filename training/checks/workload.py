"""Preflight of what a user brings: a workload, a tokenizer, initial weights. Imports no torch."""

from __future__ import annotations

import math

from ebbflow.infra.footprint import causal_lm_shape
from ebbflow.infra.preflight import Check, CheckFinding, PreflightContext
from ebbflow.training.data.tokenizer import BYTES, check_vocabulary, open_tokenizer
from ebbflow.training.errors import DataError, WorkloadError
from ebbflow.training.weights.files import find_weights
from ebbflow.training.workloads.examine import EXAMINE_SECONDS, examine

WORKLOAD_CHECK = "workload"


def check_workload(context: PreflightContext) -> CheckFinding:
    """A workload of one's own can be loaded and built, and its loss is a sum: tried in a process of its own."""
    config = context.config
    if config.workload is None:
        return CheckFinding.skipped("no workload of your own is configured")
    try:
        found = examine(config, prepare=False)
    except WorkloadError as error:
        message, _, fix = str(error).partition("; fix: ")
        return CheckFinding.failed(message, fix or f"see docs/workloads.md, then: {_command(context)}")
    return CheckFinding.passed(found.text)


def check_tokenizer(context: PreflightContext) -> CheckFinding:
    """The tokenizer can be read, and the model has a row for each of its tokens."""
    config = context.config
    if config.workload is not None:
        return CheckFinding.skipped(f"{config.workload} brings data of its own")
    try:
        tokenizer = open_tokenizer(config.data, project_root=context.project_root)
        check_vocabulary(config, tokenizer.vocab_size)
    except DataError as error:
        message, _, fix = str(error).partition("; fix: ")
        return CheckFinding.failed(message, fix)
    unused = config.model.vocab_size - tokenizer.vocab_size
    rows = (
        f"model.vocab_size {config.model.vocab_size} leaves {unused} rows unused"
        if unused
        else "as many as the model has"
    )
    if config.data.tokenizer == BYTES:
        return CheckFinding.passed(f"bytes: {tokenizer.vocab_size} tokens, {rows}")
    between = (
        "nothing stands between two files"
        if tokenizer.separator is None
        else f"token {tokenizer.separator} between files"
    )
    return CheckFinding.passed(f"{config.data.tokenizer}: {tokenizer.vocab_size} tokens, {rows}; {between}")


def check_initial_weights(context: PreflightContext) -> CheckFinding:
    """The files are there and can be read; for the built-in model, as many numbers as it has."""
    config = context.config
    path = config.training.initial_weights
    if path is None:
        return CheckFinding.skipped("training.initial_weights is null: the job starts from its seed")
    try:
        found = find_weights(path)
    except WorkloadError as error:
        message, _, fix = str(error).partition("; fix: ")
        return CheckFinding.failed(message, fix or "name a safetensors file, or a folder of them")
    numbers, files = sum(math.prod(stored.shape) for stored in found.values()), len({s.file for s in found.values()})
    arithmetic = f"{path}: {numbers:,} numbers in {len(found)} tensors, {files} files"
    if config.workload is None and numbers != (wanted := causal_lm_shape(config.model).parameters):
        return CheckFinding.failed(
            f"{arithmetic}; the model has {wanted:,}", "the model section that these weights are of"
        )
    return CheckFinding.passed(arithmetic)


def _command(context: PreflightContext) -> str:
    return f"ebbflow examine {context.config_path or 'CONFIG'}"


CHECKS: list[Check] = [
    Check(
        id=WORKLOAD_CHECK,
        title="own workload can be trained",
        severity="error",
        tier="full",  # a process that imports torch
        deadline_seconds=EXAMINE_SECONDS + 10,
        symptoms=("A01", "D14"),
        run=check_workload,
    ),
    Check(
        id="initial-weights",
        title="initial weights can be read",
        severity="error",
        tier="quick",
        deadline_seconds=30.0,
        symptoms=("H02", "H04"),
        run=check_initial_weights,
    ),
    Check(
        id="tokenizer",
        title="tokenizer fits the model",
        severity="error",
        tier="quick",
        deadline_seconds=30.0,
        symptoms=("A18", "E09"),
        run=check_tokenizer,
    ),
]
