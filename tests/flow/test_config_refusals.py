"""What a user can get wrong when starting a job: each kind gets one message with place and fix, and
writes nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from ebbflow.flows.command_line import CommandLine
from ebbflow.flows.options import check_run_options
from tests.support.flow import FlowRunner

# A default job that would start, so that each refusal below is for its own reason.
SET_STORE = ("--set", "store=store")


@dataclass(frozen=True)
class Kind:
    """text: of bad.yaml. code: 2 for the configuration, 3 for a check. says: one after another.

    words: what stands on the command line; NAME=value before it sets a variable, as in a shell.
    """

    text: str | bytes | None
    code: int
    says: tuple[str, ...]
    words: str = ""

    @property
    def variables(self) -> dict[str, str]:
        return dict(
            word.split("=", 1) for word in self.words.split() if word.startswith("EBBFLOW__")
        )

    @property
    def options(self) -> list[str]:
        return [word for word in self.words.split() if not word.startswith("EBBFLOW__")]


KINDS = {
    # files
    "no such file": Kind(
        None, 2, ("nowhere.yaml: there is no such file", "hint: "), "--config nowhere.yaml"
    ),
    "a folder": Kind(None, 2, ("is a folder", "hint: "), "--config ."),
    "not UTF-8": Kind(
        b"model:\n  num_heads: \xff\n", 2, ("bad.yaml:2:14", "byte 0xff", "save the file as UTF-8")
    ),
    "not YAML": Kind(
        "model: [1, 2", 2, ("bad.yaml:2:1", "not valid YAML", "a quote or bracket is not closed")
    ),
    "a list": Kind(
        "- 1\n- 2",
        2,
        ("bad.yaml:1:1", "must be a section of 'key: value' lines", "known keys: store"),
    ),
    # keys
    "unknown key": Kind(
        "model:\n  hiden_size: 64", 2, ("bad.yaml:2:3", "did you mean model.hidden_size?")
    ),
    "wrong section": Kind(
        "batch_size: 8", 2, ("bad.yaml:1:1", "it belongs to training: training.batch_size")
    ),
    "duplicate key": Kind(
        "model:\n  num_heads: 4\n  num_heads: 2", 2, ("bad.yaml:3:3", "twice", "bad.yaml:2:3")
    ),
    # types
    "text for a number": Kind(
        "training: {max_steps: many}", 2, ("bad.yaml:1:23", "not the text 'many'")
    ),
    "fraction for a count": Kind(
        "cluster: {nodes: 2.0}", 2, ("bad.yaml:1:18", "a whole number or auto", "write 2")
    ),
    "text for a list": Kind(
        "cost: {regions: us-east-1}", 2, ("bad.yaml:1:17", "write [us-east-1]")
    ),
    "list for a text": Kind("store: [a, b]", 2, ("bad.yaml:1:8", "store must be text, not a list")),
    "no value": Kind(
        "training:\n  seed:", 2, ("bad.yaml:2:3", "training.seed has no value", "remove the line")
    ),
    "section in options": Kind(
        "workload_options: {a: {b: 1}}", 2, ("bad.yaml:1:23", "workload_options.a must be")
    ),
    # ranges
    "out of range": Kind(
        "training: {learning_rate: -1}", 2, ("bad.yaml:1:27", "greater than 0", "default is 0.001")
    ),
    "not finite": Kind(
        "cost: {budget_usd: .nan}", 2, ("bad.yaml:1:20", "must be a finite number, not .nan")
    ),
    "misspelt choice": Kind("parallel: {mode: hdsp}", 2, ("bad.yaml:1:18", "did you mean hsdp?")),
    "port of a service": Kind(
        "metrics: {port: 70000}", 2, ("bad.yaml:1:17", "at most 65535, not 70000")
    ),
    # rules
    "heads": Kind(
        "model: {hidden_size: 770, num_heads: 12}",
        2,
        ("770 = 12 × 64 + 2", "10 or 11", "768 or 780"),
    ),
    "batch": Kind(
        "training: {batch_size: 31}", 2, ("= 2 × 1 × 1 = 2: 31 = 2 × 15 + 1", "to 30 or 32")
    ),
    "micro-batch below one": Kind(
        "training: {batch_size: 1}", 2, ("1 / (1 × 2 × 1) = 0.5", "batch_size to 2")
    ),
    "commits below one": Kind(
        "checkpoint: {interval_steps: 900}", 2, ("= 300 / 900 = 0.3333", "interval_steps to 75")
    ),
    "shards": Kind(
        "parallel: {mode: hsdp, shard_size: 3}\ncluster: {processes_per_node: 4}",
        2,
        ("bad.yaml:1:36", "2 × 4 = 8: 8 = 3 × 2 + 2", "set parallel.shard_size to 2 or 4"),
    ),
    "too many nodes": Kind(
        "cluster: {max_nodes: 1}", 2, ("nodes 2 is more than cluster.max_nodes 1", "to 1 or auto")
    ),
    "shards larger than the gang": Kind(
        "parallel: {mode: hsdp, shard_size: 8}", 2, ("(2 × 1) / 8 = 0.25", "to 2")
    ),
    "shards of another mode": Kind(
        "parallel: {shard_size: 2}", 2, ("no effect with parallel.mode fsdp2", "hsdp")
    ),
    "other mode's option": Kind(
        "ddp: {static_graph: true}", 2, ("bad.yaml:1:21", "no effect with parallel", "to ddp")
    ),
    "option without its condition": Kind(
        "fsdp: {reduce_dtype: bfloat16, use_mixed_precision: false}",
        2,
        ("with fsdp.use_mixed_precision false",),
    ),
    "redundant promise": Kind(
        "parallel: {mode: ddp}\nddp: {static_graph: true, find_unused_parameters: true}",
        2,
        ("bad.yaml:2:51", "no effect with ddp.static_graph"),
    ),
    "compressed twice": Kind(
        "parallel: {mode: ddp}\nddp: {static_graph: true, gradient_compression: powersgd}\n"
        "training: {gradient_accumulation_steps: 4}",
        2,
        ("bad.yaml:2:21", "4 times per step", "set ddp.static_graph to false"),
    ),
    # command line and environment
    "no equals sign": Kind(
        "", 2, ("written key=value", "for example model.num_heads=8"), "--set model.num_heads"
    ),
    "unknown override": Kind(
        "", 2, ("modle.num_heads=8:1:1", "model.num_heads?"), "--set modle.num_heads=8"
    ),
    "override and rule": Kind(
        "", 2, ("num_heads=7:1:17", "128 = 7 × 18 + 2", "4 or 8"), "--set model.num_heads=7"
    ),
    "variable of no key": Kind(
        "", 2, ("EBBFLOW__MODLE__SEED:1:1", "training.seed"), "EBBFLOW__MODLE__SEED=8"
    ),
    "variable of a wrong type": Kind(
        "", 2, ("TRAINING__SEED:1:25", "not the text 'x'"), "EBBFLOW__TRAINING__SEED=x"
    ),
    "job's name": Kind(
        "", 2, ("'../up' cannot be a job's name", "hint: letters, digits"), "--job ../up"
    ),
    "unknown fault": Kind("", 2, ("meteor", "node-loss"), "--rehearse meteor@60%"),
    "fault of a rank that is not there": Kind("", 2, ("7",), "--rehearse rank-kill@60%:rank=7"),
    # names and places
    "store of an unknown kind": Kind(
        "store: swift://bucket", 2, ("bad.yaml:1:8", "unknown kind", "s3://bucket/prefix")
    ),
    "store without a bucket": Kind("store: s3://", 2, ("bad.yaml:1:8", "names no bucket")),
    "store in the way": Kind(
        "", 3, ("FAIL", "store-folder", "fix: "), "--set store=bad.yaml/store"
    ),
    "no such data": Kind("data: {path: /no/such/folder}", 3, ("FAIL", "/no/such/folder", "fix: ")),
    "no such tokenizer": Kind(
        "data: {tokenizer: no/tokenizer.json}", 3, ("FAIL", "no/tokenizer.json", "fix: ")
    ),
    "vocabulary below the bytes": Kind(
        "model: {vocab_size: 128}", 2, ("128 < 256", "set model.vocab_size to 256")
    ),
    "workload without a class": Kind(
        "workload: mine.module", 2, ("bad.yaml:1:11", "package.module:Class", "write ")
    ),
    "workload as a file": Kind("workload: mine/module.py", 2, ("write mine.module:MyWorkload",)),
    "options of no workload": Kind(
        "workload_options: {width: 3}", 2, ("bad.yaml:1:27", "(width) have no effect")
    ),
    "no such prices": Kind(
        "cost: {prices: no/prices.json}", 3, ("FAIL", "no/prices.json", "fix: ")
    ),
    "unknown prices": Kind("cost: {prices: statik}", 2, ("bad.yaml:1:16", "did you mean static?")),
    "zone for a region": Kind("cost: {regions: [us-east-1a]}", 2, ("its region is us-east-1",)),
    "zone by its name": Kind(
        "cost: {zones: [us-east-1a]}", 2, ("must be zone ids", "another zone in each account")
    ),
    "zone elsewhere": Kind(
        "cost: {zones: [usw2-az1]}", 2, ("is in none of cost.regions", "use1-az… (us-east-1)")
    ),
    "push to no address": Kind(
        "metrics: {push_url: 'gateway:9091'}", 2, ("http://pushgateway:9091",)
    ),
    "metrics at a name": Kind(
        "metrics: {address: localhost}", 2, ("bad.yaml:1:20", "an IP address", "0.0.0.0")
    ),
    "bucket with one slash": Kind(
        "store: s3:/bucket/prefix", 2, ("bad.yaml:1:8", "is a place in S3", "s3://bucket")
    ),
    "weights in a bucket": Kind(
        "training: {initial_weights: 's3://b/w'}", 2, ("a path on this machine", "copy it")
    ),
    # limits
    "budget too small": Kind("cost: {budget_usd: 0.0000001}", 3, ("FAIL", "budget", "fix: ")),
    "deadline too near": Kind(
        "cost: {deadline_hours: 0.0000001}", 3, ("FAIL", "deadline", "fix: ")
    ),
}


def command_line(folder: Path, kind: Kind) -> list[str]:
    """The words after `run`, for a user who stands in a folder that holds bad.yaml and nothing
    else.
    """
    if kind.text is None:
        return kind.options
    if isinstance(kind.text, bytes):
        text = kind.text
    else:
        text = f"{kind.text}\n".encode()
    (folder / "bad.yaml").write_bytes(text)
    if b"store" in text or "store" in kind.words:
        store = ()
    else:
        store = SET_STORE
    return ["--config", "bad.yaml", *store, *kind.options]


def check_message(kind: Kind, said: str) -> None:
    at = 0
    for part in kind.says:
        assert part in said[at:], f"{part!r} is not in, or not after what stands before it:\n{said}"
        at = said.index(part, at)
    assert "Traceback" not in said and "Metaflow" not in said
    if kind.code == 3:
        assert len(re.findall("^FAIL", said, re.MULTILINE)) == 1, said
    else:
        # One message, about one thing
        assert len(re.findall(r"^\S.*:\d+:\d+: ", said, re.MULTILINE)) <= 1, said


@pytest.mark.parametrize("name", KINDS)
def test_a_job_that_cannot_be_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = KINDS[name]
    monkeypatch.chdir(tmp_path)
    for variable, value in kind.variables.items():
        monkeypatch.setenv(variable, value)
    words = command_line(tmp_path, kind)
    with pytest.raises(SystemExit) as left:
        check_run_options(CommandLine("train_flow.py", [], "run", words))
    said = capsys.readouterr()
    assert (left.value.code, said.out) == (kind.code, "")
    check_message(kind, said.err)
    assert [path.name for path in tmp_path.iterdir()] in ([], ["bad.yaml"])


@pytest.mark.parametrize(
    "name",
    [
        "no such file",
        "heads",
        "variable of a wrong type",
        "job's name",
        "unknown fault",
        "no such data",
        "zone elsewhere",
    ],
)
def test_the_flow_ends_with_the_same_message_and_code(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS[name]
    for variable, value in kind.variables.items():
        monkeypatch.setenv(variable, value)
    runner = FlowRunner(tmp_path / "home")
    (tmp_path / "here").mkdir()
    run = runner.run("run", *command_line(tmp_path / "here", kind), cwd=tmp_path / "here")
    assert run.exit_code == kind.code, run.output
    check_message(kind, run.output)
    assert [path.name for path in runner.folder.iterdir()] == [runner.log.name]
    assert [path.name for path in (tmp_path / "here").iterdir()] in ([], ["bad.yaml"])


def test_a_plan_is_made_for_where_with_sends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not for the backend that the file names, which can do what the other one cannot."""
    queue = "{name: jobs, market: on_demand, instance_types: [g5]}"
    path = tmp_path / "job.yaml"
    path.write_text(
        f"cluster: {{plan_for: kubernetes, market: spot}}\nbatch: {{queues: [{queue}]}}\n"
    )
    words = ["--with", "batch", "--config", str(path), "--set", "store=s3://bucket/jobs"]
    with pytest.raises(SystemExit) as left:
        check_run_options(CommandLine("train_flow.py", [], "run", words))
    assert left.value.code == 2
    assert (
        "cluster.market spot: none of batch.queues (jobs: on_demand) is spot"
        in capsys.readouterr().err
    )
