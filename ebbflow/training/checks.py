"""Preflight checks of the data, the disk, the parallel mode, the workload and the weights.

Imports no torch.
"""

import glob
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ebbflow.core import footprint
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.footprint import size_text
from ebbflow.core.preflight import Check, CheckFinding, PreflightContext, Tier
from ebbflow.infra.checks.store import nearest_existing, store_folder
from ebbflow.training.checkpoint.hugging_face import check_settings, our_name
from ebbflow.training.data.build import SourceFile, check_head, find_files, open_source, split_files
from ebbflow.training.data.tokenizer import (
    BYTES,
    VocabularyTokenizer,
    check_vocabulary,
    open_tokenizer,
    text_pieces,
)
from ebbflow.training.engine.parallel_limits import RankLayout, find_unsupported_options
from ebbflow.training.errors import DataError, WorkloadError
from ebbflow.training.weights.files import find_weights

_OTHERS_NAMED = 5
_OTHERS_LOOKED_AT = 2000
_READABLE_LOOKED_AT = 200
WORKLOAD_CHECK = "workload"
_FILES_ENCODED = 8
_ENCODED_BYTES = 128 * 1024  # of each of them
# Text in any language: 3 bytes per character and one token for it are 0.33, a byte per token is 1
_TOKENS_PER_BYTE = (0.05, 1.1)
_MOST_UNKNOWN = 0.05


@dataclass(frozen=True, kw_only=True)
class _TokenSample:
    """The numbers of bytes and tokens that a tokenizer made of the beginnings of some files."""

    bytes: int
    tokens: int
    unknown: int  # tokens for unknown text


def check_dataset(context: PreflightContext) -> CheckFinding:
    """Check that the data is readable text, enough for one training batch and one held-out sample."""
    config = context.config
    if config.user_code is not None:
        return CheckFinding.skipped(
            f"{config.user_code} brings data of its own; the check workload says more"
        )
    try:
        files = find_files(config.data, project_root=context.project_root)
    except DataError as error:
        return _failed(error, "set data.path to text", more=_instead(config, context.project_root))
    closed = [
        str(file.path) for file in files[:_READABLE_LOOKED_AT] if not os.access(file.path, os.R_OK)
    ]
    if closed:
        return CheckFinding.failed(
            f"{closed[0]} and perhaps more cannot be read",
            f"chmod u+r {closed[0]}, or move it away",
        )
    try:
        for file in files[:_READABLE_LOOKED_AT]:
            check_head(file)
        train, held_out = split_files(files, config.data.held_out_fraction)
    except DataError as error:
        return _failed(error)
    return _suffices(config, len(files), _bytes(train), _bytes(held_out))


def check_disk(context: PreflightContext) -> CheckFinding:
    """Check that a local store has room for the commits that retention keeps, two more commits and
    the token shards.
    """
    folder = store_folder(context)
    if folder is None:
        return CheckFinding.skipped("the store is remote")
    config = context.config
    if config.user_code is not None:
        return CheckFinding.skipped(
            f"what {config.user_code} needs is not known before its model is measured"
        )
    try:
        text = _bytes(find_files(config.data, project_root=context.project_root))
    except DataError:
        return CheckFinding.skipped("there is no dataset to size the token shards by")
    there = nearest_existing(folder)
    needed, commits = commits_room(config)
    needed = needed + text
    free = shutil.disk_usage(there if there.is_dir() else there.parent).free
    kept = size_text(footprint.optimizer_bytes(config, footprint.causal_lm_shape(config.model)))
    arithmetic = (
        f"{folder}: {size_text(free)} free, {size_text(needed)} needed = {commits} commit "
        f"({kept} of it the optimizer's state) + {size_text(text)} tokens"
    )
    if free < needed:
        fix = (
            "set store to a larger disk, or checkpoint.keep_last, keep_every_steps, keep_best or "
            "max_total_gib"
        )
        return CheckFinding.failed(arithmetic, f"{fix} so that less is kept")
    return CheckFinding.passed(arithmetic)


def commits_room(config: RunConfig) -> tuple[int, str]:
    """Return the maximum bytes that a job's commits occupy, and the calculation as text.

    The maximum includes the commits that retention keeps, one that is about to be deleted, and one
    being written.
    """
    checkpoint = config.checkpoint
    steps = config.training.max_steps
    one = footprint.commit_bytes(config, footprint.causal_lm_shape(config.model))
    if checkpoint.keep_every_steps:
        every = steps // checkpoint.keep_every_steps
    else:
        every = 0
    rules = {"last": checkpoint.keep_last, f"every {checkpoint.keep_every_steps} steps": every}
    rules["best"] = checkpoint.keep_best.count
    if checkpoint.interval == "steps":
        # Rounded up, because the last step is committed in any case
        made = -(-steps // checkpoint.interval_steps)
    else:
        made = steps
    kept = min(sum(rules.values()), made)
    words = " + ".join(f"{number} {rule}" for rule, number in rules.items() if number)
    words = f"{kept} kept" + (
        f" ({words}, of {made:,} made)" if len(words.split(" + ")) > 1 else ""
    )
    cap = checkpoint.max_total_gib
    # The newest commit is kept in any case
    if cap is not None and max(cap * 2**30, one) < kept * one:
        kept = max(1, int(cap * 2**30 // one))
        words = f"{kept} kept by max_total_gib {cap:g}"
    return (kept + 2) * one, f"({words} + 1 not yet deleted + 1 under way) × {size_text(one)}"


def check_parallel(context: PreflightContext) -> CheckFinding:
    """Check that the ranks and this machine support the configured shard size, precision, DDP
    options and compiler.
    """
    config = context.config
    place = _place(context.config)
    found = find_unsupported_options(config, place)
    if found:
        return CheckFinding.failed("; ".join(refusal.message for refusal in found), found[0].fix)
    return CheckFinding.passed("; ".join([_arrangement(config, place), *_remarks(config)]))


def check_tokenizer(context: PreflightContext) -> CheckFinding:
    """Check that the tokenizer can be read, and that the model has an embedding row for each of its
    tokens.
    """
    config = context.config
    if config.user_code is not None:
        return CheckFinding.skipped(f"{config.user_code} brings data of its own")
    try:
        tokenizer = open_tokenizer(config.data, project_root=context.project_root)
        check_vocabulary(config, tokenizer.vocab_size)
    except DataError as error:
        return _failed(error)
    rows = "as many as the model has"
    separator = tokenizer.separator
    if unused := config.model.vocab_size - tokenizer.vocab_size:
        rows = f"model.vocab_size {config.model.vocab_size} leaves {unused} rows unused"
    found = f"{config.data.tokenizer}: {tokenizer.vocab_size} tokens, {rows}"
    if config.data.tokenizer != BYTES:
        if separator is None:
            found += "; nothing stands between two files"
        else:
            found += f"; token {separator} between files"
    if not isinstance(tokenizer, VocabularyTokenizer):
        return CheckFinding.passed(found)
    for setting in tokenizer.switched_off:
        found += f"; its {setting} is switched off"
    try:
        sample = _encode_sample(config, context.project_root, tokenizer)
    except DataError:
        return CheckFinding.passed(found)  # the check of the data says what is wrong with it
    return _judge_sample(sample, found)


def check_initial_weights(context: PreflightContext) -> CheckFinding:
    """Check that `training.initial_weights` can be read and, for the built-in model, fits its
    settings and size.
    """
    config = context.config
    path = config.training.initial_weights
    if path is None:
        return CheckFinding.skipped(
            "training.initial_weights is null: the job starts from its seed"
        )
    try:
        if config.user_code is None:
            check_settings(config.model, path)
        found = find_weights(path, our_name if config.user_code is None else None)
    except WorkloadError as error:
        return _failed(error, "name a safetensors file, or a folder of them")
    numbers = sum(math.prod(stored.shape) for stored in found.values())
    files = len({s.file for s in found.values()})
    arithmetic = f"{path}: {numbers:,} numbers in {len(found)} tensors, {files} files"
    if config.user_code is None:
        wanted = footprint.causal_lm_shape(config.model).parameters
        if numbers != wanted:
            fix = "the model section that these weights are of"
            return CheckFinding.failed(f"{arithmetic}; the model has {wanted:,}", fix)
    return CheckFinding.passed(arithmetic)


def _encode_sample(
    config: RunConfig, project_root: Path, tokenizer: VocabularyTokenizer
) -> _TokenSample:
    """Encode the first bytes of some files. Raises DataError if the data cannot be read."""
    files = find_files(config.data, project_root=project_root)
    step = max(1, len(files) // _FILES_ENCODED)
    encoded = 0
    tokens = 0
    unknown = 0
    for file in files[::step][:_FILES_ENCODED]:
        with open_source(file) as stream:
            for piece in text_pieces(stream, limit=_ENCODED_BYTES):
                ids = tokenizer.encode(piece)
                encoded += len(piece)
                tokens += len(ids)
                if tokenizer.unknown_id is not None:
                    unknown += int((ids == tokenizer.unknown_id).sum())
    return _TokenSample(bytes=encoded, tokens=tokens, unknown=unknown)


def _judge_sample(sample: _TokenSample, found: str) -> CheckFinding:
    if not sample.bytes:
        return CheckFinding.passed(found)
    ratio = sample.tokens / sample.bytes
    found += f"; {sample.tokens:,} tokens of {sample.bytes:,} bytes: {ratio:.3f} tokens per byte"
    (lowest, highest) = _TOKENS_PER_BYTE
    if not lowest <= ratio <= highest:
        return CheckFinding.failed(
            f"{found}, which is not between {lowest} and {highest}",
            "a tokenizer that was trained on such text, and one that drops or adds nothing",
        )
    share = sample.unknown / max(1, sample.tokens)
    if share > _MOST_UNKNOWN:
        return CheckFinding.failed(
            f"{found}; {100 * share:.1f} % of them are the token for unknown text, at most "
            f"{100 * _MOST_UNKNOWN:.0f} % are expected",
            "a tokenizer that was trained on such text",
        )
    if sample.unknown:
        found += f", {100 * share:.2f} % unknown"
    return CheckFinding.passed(found)


def _failed(error: Exception, fix: str = "", *, more: str = "") -> CheckFinding:
    """Convert an error "MESSAGE; fix: FIX" to a finding.

    `fix` is the default fix; `more` is appended to MESSAGE.
    """
    message, _, own_fix = str(error).partition("; fix: ")
    return CheckFinding.failed(message + more, own_fix or fix)


def _suffices(config: RunConfig, files: int, train_bytes: int, held_out_bytes: int) -> CheckFinding:
    """Check that the text is enough for one training batch and one held-out sample, counting one
    byte per token.
    """
    length = config.model.sequence_length
    batch = config.training.batch_size
    samples = max(0, train_bytes - 1) // length
    gang = footprint.local_gang(config)
    if config.data.tokenizer == BYTES:
        most = ""
    else:
        most = "at most "
    if gang is None:
        ranks = ""
    else:
        ranks = f" ({batch // gang.ranks} for each of {gang.ranks} ranks)"
    if samples < batch:
        return CheckFinding.failed(
            f"{size_text(train_bytes)} of train text in {files} files make {most}{samples} "
            f"samples of {length} + 1 tokens; one batch takes {batch}{ranks}",
            "add text, or lower training.batch_size or model.sequence_length",
        )
    if held_out_bytes < length + 1:
        return CheckFinding.failed(
            f"{held_out_bytes} bytes of held-out text are less than one sample of {length} + 1 "
            "tokens",
            "add text, or raise data.held_out_fraction",
        )
    steps = config.training.max_steps
    epochs = config.training.max_steps * batch / samples
    return CheckFinding.passed(
        f"{config.data.path or 'standard library'}: {files} files, {size_text(train_bytes)} to "
        f"learn from and {size_text(held_out_bytes)} held out: {most}{samples} samples, a batch "
        f"takes {batch}{ranks}; {steps} steps are {'at least ' if most else ''}{epochs:.2g} "
        "epochs"
    )


def _instead(config: RunConfig, project_root: Path) -> str:
    folder = project_root / Path(config.data.path or "").expanduser()
    if config.data.path is None or not folder.is_dir():
        return ""
    names = (name for _, _, names in os.walk(folder) for name in names)
    endings = Counter(Path(name).suffix or "no ending" for name in islice(names, _OTHERS_LOOKED_AT))
    found = ", ".join(f"{count} × {ending}" for ending, count in endings.most_common(_OTHERS_NAMED))
    return f"; it holds {found or 'no file at all'}"


def _bytes(files: list[SourceFile]) -> int:
    return sum(file.size for file in files)


def _place(config: RunConfig) -> RankLayout:
    gang = footprint.local_gang(config)
    # If the plan will choose the number of ranks, checks that depend on it are made by the plan and
    # by the ranks.
    tensor = config.parallel.tensor_size
    if gang:
        ranks = gang.ranks
        ranks_per_node = gang.processes_per_node
    else:
        ranks = config.parallel.shard_size or 2 * tensor
        ranks_per_node = tensor
    return RankLayout(
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        gpu=bool(glob.glob("/dev/nvidia[0-9]*")),
        parameters=footprint.causal_lm_shape(config.model).parameters
        if config.user_code is None
        else None,
    )


def _arrangement(config: RunConfig, place: RankLayout) -> str:
    mode = config.parallel.mode
    if footprint.local_gang(config) is None:
        return f"{mode}, on as many ranks as the plan says"
    shard = footprint.shard_ranks(config, place.ranks, place.ranks_per_node)
    copies = place.ranks // shard
    ranks = f"{place.ranks} {'rank' if place.ranks == 1 else 'ranks'}"
    if shard == 1:
        holding = "rank that holds"
    else:
        holding = "ranks that hold"
    return (
        f"{mode}: {ranks} = {copies} {'copy' if copies == 1 else 'copies'} of the model × "
        f"{shard} {holding} one"
    )


def _remarks(config: RunConfig) -> list[str]:
    found = []
    tensor = config.parallel.tensor_size
    if tensor > 1:
        found.append(f"{tensor} consecutive ranks compute each layer together (never run on GPUs)")
    if config.parallel.recompute != "none":
        found.append(f"recompute {config.parallel.recompute}")
    if config.fsdp.use_mixed_precision == "auto" and config.script is None:
        found.append(
            "precision auto: bfloat16 on GPUs, float16 on those without it, float32 on a CPU"
        )
    if config.fsdp.compute_dtype == "float16":
        found.append(
            "float16 with loss scaling: steps that overflow are skipped; on a CPU it is very slow"
        )
    if config.parallel.compile:
        seconds = config.cluster.step_deadline_seconds
        found.append(
            "units are compiled in the first step, within cluster.step_deadline_seconds "
            f"{seconds:g}"
        )
    if config.parallel.mode == "ddp" and config.ddp.gradient_compression == "powersgd":
        found.append(
            "powersgd is lossy, and begins anew behind every commit, so that a resumed run does "
            "the same"
        )
    if config.parallel.mode == "ddp" and config.ddp.static_graph:
        found.append("from three ranks on static_graph resumes to rounding, not bit for bit")
        parts = config.training.gradient_accumulation_steps
        if parts > 1:
            found.append(
                f"static_graph reduces gradients {parts} times per step, after each micro-batch"
            )
    return found


def _check(
    id: str,
    title: str,
    run: Callable[[PreflightContext], CheckFinding],
    *symptoms: str,
    tier: Tier = "quick",
    # A large tree on a cold disk; the standard library takes a tenth of a second
    seconds: float = 30.0,
) -> Check:
    return Check(
        id=id,
        title=title,
        severity="error",
        tier=tier,
        deadline_seconds=seconds,
        symptoms=symptoms,
        run=run,
    )


CHECKS: list[Check] = [
    _check("dataset", "there is text enough", check_dataset, "A07", "A08", "E09"),
    _check("disk", "disk holds commits and tokens", check_disk, "H10"),
    _check(
        "parallel",
        "the model can be spread over the ranks",
        check_parallel,
        "A06",
        "F06",
        seconds=10.0,
    ),
    _check("initial-weights", "initial weights can be read", check_initial_weights, "H02", "H04"),
    _check("tokenizer", "tokenizer fits the model", check_tokenizer, "A18", "E09"),
]
