"""`ebbflow export skypilot CONFIG`: export a job as a SkyPilot task, for people without AWS Batch
or Kubernetes.

The task is a managed job: SkyPilot starts the planned machine, and starts the task again after a
preemption. On the machine `ebbflow supervise` continues the job from its last commit, and the agent
handles notices, checkpoints and costs. The task is valid in SkyPilot's schema, but this export was
never tested on a cloud.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from ebbflow import __version__
from ebbflow.core.config import load_config
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.json_values import JsonObject
from ebbflow.core.layout import check_job_name, plain_name
from ebbflow.core.process import run_command
from ebbflow.core.program import IMPORT_ROOT, PROJECT_ROOT
from ebbflow.core.untrusted_text import guard_terminal
from ebbflow.cost.plan.plan import Plan, make_plan
from ebbflow.cost.prices.source import open_prices
from ebbflow.flows.slurm.export import export_slurm

MOUNT = "/ebbflow"
_MOST_POOLS = 8  # of the plan's best that a task names
_INSTALL = "-r requirements.txt -e ." if PROJECT_ROOT == IMPORT_ROOT else f"ebbflow=={__version__}"
_SETUP = f"""python3 -m pip install uv
python3 -m uv venv --allow-existing --python 3.11 .venv
python3 -m uv pip install --python .venv/bin/python {_INSTALL}
"""


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes multi-line strings in block style."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    guard_terminal()
    parser = argparse.ArgumentParser(
        prog="ebbflow export", description="Write a job for another launcher."
    )
    parser.add_argument(
        "launcher",
        choices=["skypilot", "slurm"],
        help="a managed job of SkyPilot as YAML, or a batch script for sbatch, printed",
    )
    parser.add_argument("config", metavar="CONFIG", help="a YAML file below the project's folder")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one key; repeatable",
    )
    parser.add_argument(
        "--job", default="", metavar="NAME", help="name of the job (default: the file's name)"
    )
    options = parser.parse_args(list(sys.argv[1:] if arguments is None else arguments)[1:])
    if options.launcher == "slurm":
        return run_command(lambda: export_slurm(options))
    return run_command(lambda: _export(options))


def _export(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.set, project_root=PROJECT_ROOT).config
    path = Path(arguments.config).resolve()
    job = arguments.job or plain_name(Path(arguments.config).stem)
    check_job_name(job)
    refusal = refusal_reason(config, path)
    if refusal is not None:
        print(refusal, file=sys.stderr)
        return Outcome.CONFIG.exit_code
    now = time.time()
    plan = make_plan(
        config, now_utc=now, prices=open_prices(config, now, project_root=PROJECT_ROOT)
    )
    if plan.refusal:
        print(f"{plan.refusal.message} ({plan.refusal.hint})", file=sys.stderr)
        return plan.refusal.outcome.exit_code
    task = make_task(config, plan, str(path.relative_to(PROJECT_ROOT)), job, arguments.set)
    print(
        "# From the project's folder: sky jobs launch FILE. Never run on a cloud; the schema of "
        "SkyPilot accepts it."
    )
    print(yaml.dump(task, Dumper=_Dumper, sort_keys=False, width=1000), end="")
    return 0


def refusal_reason(config: RunConfig, path: Path) -> str | None:
    """Return why the job cannot be exported, with a fix, or None if it can."""
    if urlsplit(config.store).scheme != "s3":
        return f"store {config.store} ends with its machine\n  fix: --set store=s3://bucket/prefix"
    if config.cluster.nodes != 1:
        several = "agents of several nodes are started by Metaflow on Kubernetes or AWS Batch only"
        return f"cluster.nodes is {config.cluster.nodes}: {several}\n  fix: --set cluster.nodes=1"
    if not path.is_relative_to(PROJECT_ROOT):
        return (
            f"{path} is not below {PROJECT_ROOT}, which SkyPilot copies to the machine\n  fix: "
            "move the file there"
        )
    return None


def make_task(
    config: RunConfig, plan: Plan, path: str, job: str, overrides: list[str]
) -> JsonObject:
    """Build the SkyPilot task with the plan's best pools. SkyPilot takes the cheapest that it gets.

    Args:
        path: Path of the configuration, relative to the project's folder.
    """
    places = dict.fromkeys((pool.instance_type, pool.market, pool.region) for pool in plan.ranked)
    pools = list(places)[:_MOST_POOLS]
    types = dict.fromkeys(instance_type for instance_type, _, _ in pools)
    markets = {market for _, market, _ in pools}
    regions = dict.fromkeys(str(region) for _, _, region in pools)
    settings = [
        *overrides,
        f"cluster.instance_types=[{','.join(types)}]",
        f"cluster.market={markets.pop() if len(markets) == 1 else 'auto'}",
        f"cost.regions=[{','.join(regions)}]",
    ]
    words = [".venv/bin/ebbflow", "supervise", path, "--job", job]
    for setting in settings:
        words += ["--set", setting]
    return {
        "name": job,
        "num_nodes": 1,
        "workdir": ".",
        "resources": {
            "any_of": [
                {
                    "infra": f"aws/{region}",
                    "instance_type": instance_type,
                    "use_spot": market == "spot",
                }
                for instance_type, market, region in pools
            ],
            "disk_size": max(50, round(config.cost.volume_gib_per_node)),
            "job_recovery": {
                "max_restarts_on_errors": 0,
                "recover_on_exit_codes": [Outcome.INTERRUPTED.exit_code],
            },
        },
        # For the user's own files. Commits are written through S3's interface, since a mounted
        # bucket keeps no promise.
        "file_mounts": {
            MOUNT: {"source": f"s3://{urlsplit(config.store).netloc}", "mode": "MOUNT"}
        },
        "envs": {"METAFLOW_USER": "ebbflow"},
        "setup": _SETUP,
        "run": f"exec {shlex.join(words)}\n",
    }
