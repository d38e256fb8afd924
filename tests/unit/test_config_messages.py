"""What a user gets wrong in a configuration is told at once: where it stands, the arithmetic, the
fix.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbflow.core.config import ConfigError, LoadedConfig, load_config
from ebbflow.core.errors import Outcome

ROOT = Path(__file__).resolve().parents[2]

RENDERED = {
    "width not divisible by heads": (
        "model:\n  hidden_size: 770\n  num_heads: 12\n",
        """\
bad.yaml:2:16: model.hidden_size must be divisible by model.num_heads: 770 = 12 × 64 + 2
     2 |   hidden_size: 770
       |                ^^^
  hint: set model.num_heads to 10 or 11, or model.hidden_size to 768 or 780""",
    ),
    "more heads than width": (
        "model: {hidden_size: 4, num_heads: 12}",
        """\
bad.yaml:1:22: width of an attention head must be at least 1, or a head sees nothing: \
model.hidden_size / model.num_heads = 4 / 12 = 0.3333
     1 | model: {hidden_size: 4, num_heads: 12}
       |                      ^
  hint: set model.hidden_size to 12, or model.num_heads to 4""",
    ),
    "heads of keys that do not divide heads": (
        "model: {architecture: llama, num_heads: 4, num_kv_heads: 3}",
        """\
bad.yaml:1:58: model.num_heads must be a multiple of model.num_kv_heads: 4 = 3 × 1 + 1
     1 | model: {architecture: llama, num_heads: 4, num_kv_heads: 3}
       |                                                          ^
  hint: set model.num_kv_heads to 2 or 4""",
    ),
    "heads that cannot be rotated": (
        "model: {architecture: llama, hidden_size: 20, num_heads: 4}",
        """\
bad.yaml:1:43: the width of an attention head must be even for rotary positions: 5 = model.hidden_size / \
model.num_heads = 20 / 4
     1 | model: {architecture: llama, hidden_size: 20, num_heads: 4}
       |                                           ^^
  hint: set model.head_size to 6""",
    ),
    "an option of llama without it": (
        "model:\n  qk_norm: true\n",
        """\
bad.yaml:2:12: model.qk_norm has no effect with model.architecture gpt: it is an option of llama
     2 |   qk_norm: true
       |            ^^^^
  hint: set model.architecture to llama, or model.qk_norm to false, the default""",
    ),
    "a token beyond the vocabulary": (
        "model:\n  end_of_document: 256\n",
        """\
bad.yaml:2:20: model.end_of_document 256 is no token: model.vocab_size 256 has tokens 0 to 255
     2 |   end_of_document: 256
       |                    ^^^
  hint: set model.end_of_document to 0 or 255, or model.vocab_size to 257""",
    ),
    "batch not divisible by ranks": (
        "cluster:\n  nodes: 3\ntraining:\n  batch_size: 32\n  gradient_accumulation_steps: 2\n",
        """\
bad.yaml:4:15: training.batch_size must be a multiple of cluster.nodes × cluster.processes_per_node × \
training.gradient_accumulation_steps = 3 × 1 × 2 = 6: 32 = 6 × 5 + 2
     4 |   batch_size: 32
       |               ^^
  hint: set training.batch_size to 30 or 36""",
    ),
    "accumulation that does not divide": (
        "training:\n  gradient_accumulation_steps: 5\n",
        """\
bad.yaml:2:32: training.batch_size must be a multiple of cluster.nodes × cluster.processes_per_node × \
training.gradient_accumulation_steps = 2 × 1 × 5 = 10: 32 = 10 × 3 + 2
     2 |   gradient_accumulation_steps: 5
       |                                ^
  hint: set training.batch_size to 30 or 40, or training.gradient_accumulation_steps to 2 or 4""",
    ),
    "misspelt key": (
        "model:\n  hiden_size: 64\n",
        """\
bad.yaml:2:3: unknown key model.hiden_size
     2 |   hiden_size: 64
       |   ^^^^^^^^^^
  hint: did you mean model.hidden_size?""",
    ),
    "key in the wrong section": (
        "learning_rate: 1e-3\n",
        """\
bad.yaml:1:1: unknown key learning_rate
     1 | learning_rate: 1e-3
       | ^^^^^^^^^^^^^
  hint: it belongs to training: training.learning_rate""",
    ),
    "dotted key in a file": (
        "model.num_heads: 4\n",
        """\
bad.yaml:1:1: unknown key model.num_heads
     1 | model.num_heads: 4
       | ^^^^^^^^^^^^^^^
  hint: write num_heads on a line of its own in the section model""",
    ),
    "duplicate key": (
        "model:\n  num_heads: 4\n  num_layers: 2\n  num_heads: 8\n",
        """\
bad.yaml:4:3: model.num_heads is given twice; the first is at bad.yaml:2:3
     4 |   num_heads: 8
       |   ^^^^^^^^^
  hint: keep one of the two""",
    ),
    "text for a number": (
        "training:\n  max_steps: many\n",
        """\
bad.yaml:2:14: training.max_steps must be a whole number, not the text 'many'
     2 |   max_steps: many
       |              ^^^^
  hint: the default is 300""",
    ),
    "number in quotes": (
        'training:\n  max_steps: "300"\n',
        """\
bad.yaml:2:14: training.max_steps must be a whole number, not the text '300'
     2 |   max_steps: "300"
       |              ^^^^^
  hint: remove the quotes: 300""",
    ),
    "fraction for a count": (
        "cluster: {nodes: 2.0}",
        """\
bad.yaml:1:18: cluster.nodes must be a whole number or auto, not the number 2.0
     1 | cluster: {nodes: 2.0}
       |                  ^^^
  hint: write 2""",
    ),
    "leading zero": (
        "training:\n  seed: 012\n",
        """\
bad.yaml:2:9: training.seed must be a whole number, not 012
     2 |   seed: 012
       |         ^^^
  hint: write 12: a leading zero may mean an octal number""",
    ),
    "misspelt choice": (
        "parallel:\n  mode: FSDP\n",
        """\
bad.yaml:2:9: parallel.mode must be one of ddp, fsdp2, hsdp, not the text 'FSDP'
     2 |   mode: FSDP
       |         ^^^^
  hint: did you mean fsdp2?""",
    ),
    "on is no name of a schedule": (
        "training: {scheduler: {type: on}}",
        """\
bad.yaml:1:30: training.scheduler.type must be one of constant, linear_warmup, cosine, wsd, not the text 'on'
     1 | training: {scheduler: {type: on}}
       |                              ^^
  hint: the default is cosine""",
    ),
    "out of range": (
        "training:\n  batch_size: 0\n",
        """\
bad.yaml:2:15: training.batch_size must be at least 1, not 0
     2 |   batch_size: 0
       |               ^
  hint: the default is 32""",
    ),
    "not finite": (
        "training:\n  learning_rate: .inf\n",
        """\
bad.yaml:2:18: training.learning_rate must be a finite number, not .inf
     2 |   learning_rate: .inf
       |                  ^^^^
  hint: the default is 0.001""",
    ),
    "key without a value": (
        "training:\n  max_steps:\n",
        """\
bad.yaml:2:3: training.max_steps has no value; it must be a whole number
     2 |   max_steps:
       |   ^^^^^^^^^
  hint: remove the line for the default""",
    ),
    "value for a section": (
        "model: 3\n",
        """\
bad.yaml:1:8: model must be a section of 'key: value' lines, not the number 3
     1 | model: 3
       |        ^
  hint: known keys: hidden_size, num_layers, num_heads, sequence_length, vocab_size, \
architecture, end_of_document, tied_embeddings, norm_epsilon, num_kv_heads, head_size, intermediate_size, \
qkv_bias, qk_norm, rope_theta, rope_factor, rope_original_length""",
    ),
    "text for a list": (
        "data:\n  suffixes: .txt\n",
        """\
bad.yaml:2:13: data.suffixes must be a list of texts, not the text '.txt'
     2 |   suffixes: .txt
       |             ^^^^
  hint: write [.txt]""",
    ),
    "warm-up longer than the job": (
        "training:\n  max_steps: 60\n  scheduler:\n    warmup_steps: 90\n",
        """\
bad.yaml:4:19: training.scheduler.warmup_steps must not exceed training.max_steps: 90 > 60
     4 |     warmup_steps: 90
       |                   ^^
  hint: set training.scheduler.warmup_steps to 6, or training.max_steps to 900""",
    ),
    "no commit before the end": (
        "checkpoint:\n  interval_steps: 1000\n",
        """\
bad.yaml:2:19: commits of the job must be at least 1, or an interruption loses everything: \
training.max_steps / checkpoint.interval_steps = 300 / 1000 = 0.3
     2 |   interval_steps: 1000
       |                   ^^^^
  hint: set training.max_steps to 4000, or checkpoint.interval_steps to 75""",
    ),
    "vocabulary smaller than a byte": (
        "model: {vocab_size: 128}",
        """\
bad.yaml:1:21: model.vocab_size must be at least 256, one for each byte of the text: 128 < 256
     1 | model: {vocab_size: 128}
       |                     ^^^
  hint: set model.vocab_size to 256""",
    ),
    "store of an unknown kind": (
        "store: swift://bucket/folder",
        """\
bad.yaml:1:8: store 'swift://bucket/folder' is of an unknown kind
     1 | store: swift://bucket/folder
       |        ^^^^^^^^^^^^^^^^^^^^^
  hint: use a folder, or s3://bucket/prefix""",
    ),
    "tab": (
        "model:\n\tnum_heads: 4\n",
        """\
bad.yaml:2:1: not valid YAML: a tab where YAML wants spaces while scanning for the next token
     2 |  num_heads: 4
       | ^
  hint: YAML indents with spaces; replace the tab""",
    ),
    "bracket not closed": (
        "data:\n  suffixes: [.py, .txt\n",
        """\
bad.yaml:3:1: not valid YAML: expected ',' or ']', but got '<stream end>' while parsing a flow sequence
     3 |
       | ^
  hint: a quote or bracket is not closed""",
    ),
    "a list instead of sections": (
        "- model\n- training\n",
        """\
bad.yaml:1:1: bad.yaml must be a section of 'key: value' lines, not a list
     1 | - model
       | ^^^^^^^
  hint: known keys: store, script, script_args, workload, workload_options, model, training, data, parallel, ddp, \
fsdp, cluster, batch, kubernetes, slurm, checkpoint, cost, metrics, trackers, notifications, survival, guards""",
    ),
    "not text at all": (
        b"model:\n  num_heads: \xff\n",
        """\
bad.yaml:2:14: not UTF-8 text: byte 0xff at offset 20
     2 |   num_heads: \ufffd
       |              ^
  hint: save the file as UTF-8""",
    ),
    "an object of Python": (
        "model: {num_heads: !!python/name:os.system 3}",
        """\
bad.yaml:1:20: model.num_heads has the tag !!python/name:os.system, which a configuration has no use for
     1 | model: {num_heads: !!python/name:os.system 3}
       |                    ^^^^^^^^^^^^^^^^^^^^^^^^^
  hint: remove the tag""",
    ),
}


def load(folder: Path, text: str | bytes, *overrides: str) -> LoadedConfig:
    """A file bad.yaml of that text, loaded by a user who stands in its folder."""
    file = folder / "bad.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config("bad.yaml", overrides, project_root=ROOT, cwd=folder)


def complaint(folder: Path, text: str | bytes, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    assert caught.value.outcome is Outcome.CONFIG
    return str(caught.value)


@pytest.mark.parametrize("name", RENDERED)
def test_a_bad_file_gets_this_message(tmp_path: Path, name: str) -> None:
    text, expected = RENDERED[name]
    assert complaint(tmp_path, text) == expected
