"""`make compat`: a short gang job on the oldest and the tested torch, on the newest that can be
had, and on the oldest supported packages; and whether Ebbflow can be installed beside other stacks.

Each environment trains a small job twice: once uninterrupted, and once with a rank killed after a commit,
so that the job resumes. Losses, samples and weights of the two must be equal, bit for bit
(`ebbflow certify`). The stacks are resolved by uv, which downloads metadata alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ebbflow.core.requirements import REQUIREMENTS

# Of Python and torch: the oldest, the tested one, and the newest that can be had
NEWEST = "newest"
PAIRS = (("3.11", "2.7.0"), ("3.13", "2.13.0"), ("3.11", NEWEST))
LOWEST = "lowest"  # the environment with the oldest supported version of each package
STACKS = "stacks"
# What people install beside a trainer. Each line is resolved together with Ebbflow and its extra.
STACK_REQUIREMENTS = (
    "s3fs",
    "gcsfs",
    "gluonts[torch]",
    "autogluon.timeseries",
    "lightning",
    "transformers peft trl accelerate",
    "deepspeed",
    "ray[train]",
    "mlflow",
    "wandb",
    "dbt-core dbt-duckdb",
    "prefect",
    "dagster",
    "apache-airflow-providers-amazon",
    "torchvision timm",
    "sentence-transformers",
    "datasets",
    "mosaicml-streaming",
    "webdataset",
    "bitsandbytes",
    "torchmetrics torch-geometric",
    "diffusers",
    "stable-baselines3",
    "pytorch-forecasting",
    "scikit-learn xgboost lightgbm",
    "polars pyarrow duckdb",
    "dask[complete]",
    "fastapi uvicorn",
    "jupyterlab",
    "zarr xarray",
    "metaflow-checkpoint",
)
_ROOT = Path(__file__).resolve().parents[1]
_INSTALL_SECONDS = 3600.0
_JOB_SECONDS = 900.0
_RESOLVE_SECONDS = 900.0  # the first stack downloads the metadata that the others share
_STEPS = "14"
_SETTINGS = ("cluster.nodes=1", "cluster.processes_per_node=2")


def main(arguments: Sequence[str]) -> int:
    """Return 0 if the job holds on every pair; the last lines are a table of the results."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.compat", description=" ".join(__doc__.split("\n\n")[0].split())
    )
    pairs = " ".join(f"{python}:{torch}" for python, torch in PAIRS)
    parser.add_argument(
        "pairs",
        nargs="*",
        metavar="PYTHON:TORCH",
        help=f"versions to install and try, {LOWEST} or {STACKS} ({pairs} {LOWEST} {STACKS})",
    )
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="FILE",
        help="interpreter of an environment that is complete",
    )
    given = parser.parse_args(arguments)
    words = given.pairs or ([] if given.python else [*pairs.split(), LOWEST, STACKS])
    chosen = [tuple(word.split(":", 1)) for word in words if word not in (LOWEST, STACKS)]
    if any(len(pair) != 2 for pair in chosen):
        parser.error(f"a pair is PYTHON:TORCH, such as 3.11:2.7.0; or {LOWEST}, or {STACKS}")
    results = [(python, _try_job(Path(python).absolute())) for python in given.python]
    if LOWEST in words:
        results.append((LOWEST, _try_lowest()))
    if STACKS in words:
        results += [(stack, resolve_beside(stack)) for stack in STACK_REQUIREMENTS]
    for python, torch in chosen:
        with tempfile.TemporaryDirectory(prefix=f"compat-{python}-{torch}-") as folder:
            problem = make_environment(Path(folder), python, torch)
            results.append(
                (f"{python}:{torch}", problem or _try_job(Path(folder, "bin", "python")))
            )
    for name, result in results:
        print(f"{name}: {result}")
    return int(any(not result.startswith("holds") for _, result in results))


def make_environment(folder: Path, python: str, torch: str) -> str:
    """Install the requirements with one release of torch. Return why that failed, or ""."""
    found = shutil.which(f"python{python}")
    if found is None:
        return (
            f"failed: python{python} is not on PATH; fix: install it, or name an interpreter "
            "with --python"
        )
    lines = [
        line.partition("#")[0].strip()
        for line in (_ROOT / "requirements.txt").read_text().splitlines()
    ]
    others = [line for line in lines if line and not re.match(r"torch\b", line)]
    install = [
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "torch" if torch == NEWEST else f"torch=={torch}",
        *others,
    ]
    for command in ([found, "-m", "venv", str(folder)], install):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS)
        if done.returncode != 0:
            return f"failed: {' '.join(command[:4])}: {done.stderr.strip()[-500:]}"
    return ""


def resolve_beside(stack: str) -> str:
    """Return "holds: …" if Ebbflow with the extra `flow` can be installed beside packages."""
    lines = [*map(str, REQUIREMENTS), *stack.split()]
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "--quiet", "--no-header"]
    command += ["--no-annotate", "--python-version", PAIRS[0][0]]
    try:
        done = subprocess.run(
            command,
            input="\n".join(lines),
            capture_output=True,
            text=True,
            timeout=_RESOLVE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"failed: not resolved within {_RESOLVE_SECONDS:g} s"
    if done.returncode != 0:
        return f"failed: {' '.join(done.stderr.split())[-500:]}"
    own = {requirement.name.replace(".", "-") for requirement in REQUIREMENTS}
    held = [line for line in done.stdout.splitlines() if line.partition("==")[0] in own]
    return f"holds: {' '.join(held)}"


def describe_certificate(found: dict, versions: str) -> str:
    """Describe the result in one line, which begins with "holds" only if a resumed run was equal to
    the other.
    """
    (killed,) = found["interruptions"]
    resumed = ", ".join(map(str, killed["resumed_from"]))
    if found["holds"] and resumed:
        return (
            f"holds: {versions}: {found['steps']} steps, rank killed, resumed at step {resumed}, "
            "equal bit for bit"
        )
    return f"failed: {versions}: {'; '.join(killed['differences']) or 'the job was never resumed'}"


def _try_lowest() -> str:
    """Try the job with the oldest supported version of each package that every installation has."""
    lines = [str(requirement) for requirement in REQUIREMENTS if not requirement.extra]
    with tempfile.TemporaryDirectory(prefix="compat-lowest-") as folder:
        python = Path(folder, "bin", "python")
        uv = [sys.executable, "-m", "uv"]
        install = [*uv, "pip", "install", "--quiet", "--python", str(python)]
        install += ["--resolution", "lowest-direct", *lines]
        for command in ([*uv, "venv", "--quiet", "--python", PAIRS[0][0], folder], install):
            done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS)
            if done.returncode != 0:
                return f"failed: {' '.join(command[2:6])}: {done.stderr.strip()[-500:]}"
        return _try_job(python)


def _try_job(python: Path) -> str:
    with tempfile.TemporaryDirectory(prefix="compat-job-") as folder:
        certificate = Path(folder, "certificate.json")
        command = [
            str(python),
            "-m",
            "ebbflow.training",
            "certify",
            str(_ROOT / "ebbflow/configs" / "laptop.yaml"),
        ]
        for setting in _SETTINGS:
            command += ["--set", setting]
        command += [
            "--steps",
            _STEPS,
            "--only",
            "a rank is killed",
            "--json",
            str(certificate),
            "--folder",
            folder,
        ]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(_ROOT)},
                capture_output=True,
                text=True,
                timeout=_JOB_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"failed: the job took more than {_JOB_SECONDS:g} s"
        if not certificate.exists():
            return (
                f"failed: exit code {done.returncode}: "
                f"{(done.stdout + done.stderr).strip()[-1500:]}"
            )
        found = json.loads(certificate.read_text())
    return describe_certificate(found, _versions(python))


def _versions(python: Path) -> str:
    code = (
        "import platform, torch; print(f'Python {platform.python_version()}, torch "
        "{torch.__version__}')"
    )
    return subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, timeout=300
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
