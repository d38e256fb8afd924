"""`make metaflow-releases`: the same tests on several releases of Metaflow, each in an environment
of its own.

An environment is a thin one: its own interpreter link and its own Metaflow, and everything else
from the environment that runs this, so that nothing but the release differs and no package is
installed twice.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

# The newest, and two before it. 2.19.39 alone has @package_sources; the others take the way of
# flows/decorators.py.
RELEASES = ("2.19.0", "2.19.20", "2.19.39")
# A run on this machine that loses a node and a rank; in a local AWS Batch one node on Spot, then
# two on demand.
TESTS = (
    "tests/unit/test_metaflow_contracts.py",
    "tests/flow/test_flow_survival.py::test_a_node_and_then_a_rank_are_lost[1]",
    "tests/soak/soak_batch_gang.py",
)
_ROOT = Path(__file__).resolve().parents[1]
_SECONDS = 1800


def main(arguments: list[str]) -> int:
    """0 when all tests pass on all releases; the table of what was run comes last."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.releases", description=" ".join(__doc__.split("\n\n")[0].split())
    )
    parser.add_argument(
        "releases", nargs="*", default=RELEASES, help=f"of Metaflow ({', '.join(RELEASES)})"
    )
    parser.add_argument("--tests", nargs="+", default=TESTS, help="what pytest is to run")
    known = parser.parse_args(arguments)
    results = {}
    for release in known.releases:
        with tempfile.TemporaryDirectory(prefix=f"metaflow-{release}-") as folder:
            python = environment_with(release, Path(folder))
            results[release] = run_tests(python, known.tests)
    for release, said in results.items():
        print(f"metaflow {release:8} {said}")
    return int(
        any(
            "passed" not in said or "failed" in said or "error" in said for said in results.values()
        )
    )


def environment_with(release: str, folder: Path) -> Path:
    """The interpreter of a new environment in `folder`.

    Raises CalledProcessError where there is no such release.
    """
    venv.create(folder, symlinks=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (own / "everything-else.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    install = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--target",
        str(own),
    ]
    subprocess.run([sys.executable, *install, f"metaflow=={release}"], check=True, timeout=_SECONDS)
    python = folder / "bin" / "python"
    asked = "import metaflow; print(metaflow.__version__)"
    found = subprocess.run(
        [python, "-c", asked], capture_output=True, text=True, check=True, timeout=120
    )
    if found.stdout.strip() != release:
        raise RuntimeError(f"{python} imports metaflow {found.stdout.strip()}, not {release}")
    return python


def run_tests(python: Path, tests: list[str]) -> str:
    """pytest's last line."""
    command = [str(python), "-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider", *tests]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", "")]),
    }
    done = subprocess.run(
        command,
        cwd=_ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    print(done.stdout, flush=True)
    if done.stdout.strip():
        return done.stdout.strip().splitlines()[-1]
    return f"exit code {done.returncode}, no word"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
