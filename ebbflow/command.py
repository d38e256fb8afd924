"""The console command `ebbflow`: every command of the project under one help."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from ebbflow import __version__
from ebbflow.core.process import run_benchmarks
from ebbflow.core.program import PACKAGE_ROOT, begin_program

# name: (module whose main(words) runs it, one line of help). Modules are imported only when their
# command is used.
COMMANDS: dict[str, tuple[str, str]] = {
    "run": (
        "flows/train_flow.py",
        "train a job: preflight, plan, training, report; or run SCRIPT.py",
    ),
    "resume": ("flows/train_flow.py", "go on with the newest run under its own plan and settings"),
    "card": ("flows/train_flow.py", "show a run's report in the browser: card view report"),
    "supervise": (
        "flows/supervise.py",
        "run a job again after each interruption until it is complete",
    ),
    "preflight": ("ebbflow.infra.__main__", "find what is wrong with a job before it starts"),
    "plan": ("ebbflow.cost.__main__", "rank the capacity pools that could run a configuration"),
    "report": ("ebbflow.cost.__main__", "show what a job trained, what it cost and what was lost"),
    "watch": ("ebbflow.cost.__main__", "show a running job's live page: progress, dollars, plots"),
    "jobs": (
        "ebbflow.cost.__main__",
        "list all jobs: running, waiting, done, spent, forecast, and who may start",
    ),
    "logs": ("ebbflow.infra.__main__", "show the output of a job's ranks"),
    "diagnose": (
        "ebbflow.infra.__main__",
        "name the failure in anybody's logs, with its cause and fix",
    ),
    "explain": ("ebbflow.infra.__main__", "print causes and fixes of a symptom, such as D07"),
    "bundle": (
        "ebbflow.infra.__main__",
        "pack what a colleague needs to understand a job, without secrets",
    ),
    "checkpoints": (
        "ebbflow.training.__main__",
        "list, verify, pin, export and prune the commits of a job",
    ),
    "config": (
        "ebbflow.infra.__main__",
        "show every value of a configuration and where it comes from",
    ),
    "schema": ("ebbflow.infra.__main__", "print the JSON schema of configurations, for editors"),
    "new": (
        "ebbflow.workloads.new",
        "write a workload of your own, its test and its configuration",
    ),
    "examine": (
        "ebbflow.training.__main__",
        "try a workload of your own and print its model's shape",
    ),
    "compare": (
        "ebbflow.training.__main__",
        "measure one's own model in each parallel mode, on this machine",
    ),
    "certify": ("ebbflow.training.__main__", "prove that a configuration resumes exactly"),
    "trace": ("ebbflow.observe.trace", "write a job's timeline for ui.perfetto.dev"),
    "track": (
        "ebbflow.observe.track",
        "send a job's metrics to W&B, MLflow, TensorBoard or JSON Lines files",
    ),
    "observe": (
        "ebbflow.infra.__main__",
        "watch this machine's jobs with Prometheus, alert rules included",
    ),
    "doctor": (
        "ebbflow.training.__main__",
        "kill a script, let it resume, and name what its own resume loses",
    ),
    "prices": (
        "ebbflow.cost.__main__",
        "record live spot prices, or show those that a plan would use",
    ),
    "export": (
        "ebbflow.flows.skypilot",
        "write a job as a task of SkyPilot: export skypilot CONFIG",
    ),
    "replay": (
        "ebbflow.cost.__main__",
        "price a job again under other capacity or another checkpoint interval",
    ),
    "reconcile": ("ebbflow.cost.__main__", "compare a job's ledger with the cloud's bill"),
    "catalogue": (
        "ebbflow.cost.__main__",
        "renew the tables of instances, prices and interruptions from AWS",
    ),
    "deploy": (
        "ebbflow.infra.__main__",
        "make the AWS resources of a stack, or show what would change",
    ),
    "adopt": (
        "ebbflow.infra.__main__",
        "write a configuration for queues that an AWS account already has",
    ),
    "kubernetes": ("ebbflow.infra.__main__", "check whether a Kubernetes cluster can run a job"),
    "bench": ("benchmarks", "run a benchmark (source checkout only)"),
    "soak": ("benchmarks", "run a long proof (source checkout only)"),
    "completion": ("ebbflow.command", "print a completion script for bash, zsh or fish"),
}
_USAGE_EXIT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, which is 2 if the command is unknown.

    Args:
        arguments: the command's name and its options; None uses those of this process.
    """
    begin_program()
    name, *words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("--version", "-V"):
        print(f"ebbflow {__version__}")
        return 0
    if name in ("--help", "-h", "help"):
        print(render_help())
        return 0
    if name not in COMMANDS:
        import difflib

        close = difflib.get_close_matches(name, COMMANDS, n=1)
        if close:
            hint = f"did you mean {close[0]}?"
        else:
            hint = "ebbflow --help lists the commands"
        print(f"ebbflow: there is no command {name!r}; {hint}", file=sys.stderr)
        return _USAGE_EXIT
    place = COMMANDS[name][0]
    if "--" in words:
        own = words[: words.index("--")]
    else:
        own = words
    if name == "run" and "--profile" in own:
        at = words.index("--profile")
        try:
            first, last = map(int, words[at + 1].split(":"))
            if not 0 < first <= last:
                raise ValueError
        except (ValueError, IndexError):
            print(
                "ebbflow run: --profile takes FIRST:LAST, the steps to profile, such as 10:15",
                file=sys.stderr,
            )
            return _USAGE_EXIT
        steps = {"profile_from": first, "profile_steps": last - first + 1}
        words[at : at + 2] = [
            word for key, value in steps.items() for word in ("--set", f"training.{key}={value}")
        ]
        if "--" in words:
            own = words[: words.index("--")]
        else:
            own = words
    script = next((word for word in own if word.endswith(".py") and "=" not in word), None)
    if name == "run" and script is not None:
        from ebbflow.training.attach.script import flow_options

        words.remove(script)
        # Behind an option of the flow, it would be read as the option's value
        words.insert(0, script)
        options = flow_options(words)
        if options is None:  # under an agent, without Metaflow
            place = "ebbflow.training.__main__"
        else:
            program = str(PACKAGE_ROOT / place)
            os.execv(sys.executable, [sys.executable, program, *options])
    if name == "completion":
        return _print_completion(words)
    if place == "benchmarks":
        if words[:1] in (["gpu"], ["diagnose"]):
            own = words[:1]
        else:
            own = []
        run_benchmarks([*(own or ["soak" if name == "soak" else "training"]), *words[len(own) :]])
    if place.endswith(".py"):  # a program of its own: Metaflow starts it again for each step
        program = str(PACKAGE_ROOT / place)
        os.execv(
            sys.executable,
            [sys.executable, program, *([] if name == "supervise" else [name]), *words],
        )
    from ebbflow.core.process import exit_when_interrupted

    exit_when_interrupted()
    return import_module(place).main([name, *words]) or 0


def render_help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    usage = (
        "usage: ebbflow COMMAND …    (ebbflow COMMAND --help shows its options; ebbflow --version)"
    )
    return "\n".join(
        [usage, "", "Cost-aware PyTorch training that survives spot interruptions.", "", *lines]
    )


_COMPLETIONS = {
    "bash": "complete -W '{names}' -o default ebbflow",
    "zsh": "#compdef ebbflow\n_ebbflow() {{ _arguments '1:command:({names})' '*:file:_files' }}\n"
    "compdef _ebbflow ebbflow",
    "fish": "complete -c ebbflow -n __fish_use_subcommand -a '{names}'",
}


def _print_completion(words: Sequence[str]) -> int:
    if len(words) != 1 or words[0] not in _COMPLETIONS:
        print(
            "usage: ebbflow completion bash|zsh|fish    (add its output to the shell's start file)",
            file=sys.stderr,
        )
        return _USAGE_EXIT
    print(_COMPLETIONS[words[0]].format(names=" ".join(COMMANDS)))
    return 0
