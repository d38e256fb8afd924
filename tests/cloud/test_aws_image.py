"""The image's recipe, read: nothing here builds it.

What it installs, holds and lacks is what the project says.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from ebbflow.infra.aws.deploy import TEMPLATE, read_template

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "ebbflow/infra" / "docker" / "Dockerfile"


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, str]]:
    """(instruction, the rest) of each line, continued lines put together."""
    lines = [
        line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")
    ]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(instruction, rest.strip()) for instruction, _, rest in found]


def of(steps: list[tuple[str, str]], instruction: str) -> list[str]:
    return [rest for name, rest in steps if name == instruction]


def test_both_bases_are_named_to_the_patch_and_can_be_pinned_by_digest(
    steps: list[tuple[str, str]],
) -> None:
    arguments = dict(rest.split("=", 1) for rest in of(steps, "ARG"))
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-base-ubuntu\d+\.\d+", arguments["CUDA_IMAGE"])
    major, minor = re.match(r"python:(\d+)\.(\d+)\.\d+-", arguments["PYTHON_IMAGE"]).groups()
    assert (int(major), int(minor)) == (3, 11), "the version that the tests run with"
    assert of(steps, "FROM") == ["${PYTHON_IMAGE} AS python", "${CUDA_IMAGE}"]


def test_the_image_installs_requirements_txt_with_every_line_pinned(
    steps: list[tuple[str, str]],
) -> None:
    [install] = [rest for rest in of(steps, "RUN") if "pip install" in rest]
    assert "-r requirements.txt -r requirements-kubernetes.txt" in install, (
        "the supervisor asks the API server"
    )
    assert not re.search(r"pip install[^&]*[a-z0-9_-]+[=~]=", install), (
        "no version is named beside requirements.txt"
    )
    texts = [
        path.read_text()
        for path in (ROOT / "requirements.txt", ROOT / "requirements-kubernetes.txt")
    ]
    lines = [line.partition("#")[0].strip() for line in "\n".join(texts).splitlines()]
    names = set()
    for line in filter(None, lines):
        pin = re.fullmatch(r"([a-z0-9.-]+)(==|~=)\d+(\.\d+)+", line)
        assert pin, line
        names.add(pin[1])
    [told] = re.findall(r"import (torch[^;]*);", install)
    assert {name.strip() for name in told.split(",")} <= names, (
        "the check of the build imports what is installed"
    )


def test_the_image_has_a_compiler_tokenizers_and_gpu_counters(
    steps: list[tuple[str, str]],
) -> None:
    packages = next(rest for rest in of(steps, "RUN") if "apt-get install" in rest).split()
    assert "g++" in packages, "torch.compile needs a compiler: of C for GPUs, of C++ for CPUs"
    pinned = (ROOT / "requirements.txt").read_text()
    assert all(
        re.search(rf"^{name}~=", pinned, re.MULTILINE)
        for name in ("tokenizers", "nvidia-ml-py", "py-spy")
    )
    assert re.search(
        r"^torch==2\.13\.0\b", pinned, re.MULTILINE
    ) and "assert torch.version.cuda" in " ".join(of(steps, "RUN"))


def test_the_image_holds_the_project_and_the_head_jobs_command(
    steps: list[tuple[str, str]],
) -> None:
    copied = set()
    for rest in of(steps, "COPY"):
        if not rest.startswith("--from"):
            copied |= set(rest.split()[:-1])
    assert copied == {
        "requirements.txt",
        "requirements-kubernetes.txt",
        "ebbflow",
        "flows",
        "training",
        "cost",
        "infra",
        "configs",
        "examples",
    }
    assert all((ROOT / name).exists() for name in copied)
    allowed = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in allowed if line.startswith("!")} == copied and "*" in allowed
    template = read_template(TEMPLATE.read_text())
    words = shlex.split(template["Parameters"]["HeadCommand"]["Default"])
    files = [word for word in words if word.endswith((".py", ".yaml"))]
    assert files and all(Path(file).parts[0] in copied and (ROOT / file).exists() for file in files)
    assert of(steps, "WORKDIR")[-1] == "/opt/ebbflow", "where the head job's command finds them"


def test_the_efa_installer_runs_only_if_its_publisher_signed_it(
    steps: list[tuple[str, str]], tmp_path: Path
) -> None:
    [install] = [rest for rest in of(steps, "RUN") if "efa_installer.sh" in rest]
    assert install.index('fetch_efa.sh "${EFA_INSTALLER}" "${EFA_KEY}"') < install.index(
        "./efa_installer.sh"
    )
    for command in ("gpg", "curl"):
        if shutil.which(command) is None:
            pytest.skip(f"no {command} on this machine")
    home = tmp_path / "gpg"
    home.mkdir(mode=0o700)
    gpg = ["gpg", "--homedir", str(home), "--batch", "--quiet", "--passphrase", "", "--yes"]
    fingerprints = []
    for name in ("publisher", "stranger"):
        subprocess.run([*gpg, "--quick-generate-key", name, "ed25519", "sign"], check=True)
        listed = subprocess.run(
            [*gpg, "--with-colons", "-k", name], check=True, capture_output=True, text=True
        )
        fingerprints.append(re.search(r"fpr:+(\w+)", listed.stdout)[1])
    site = tmp_path / "site"
    (site / "aws-efa-installer").mkdir(parents=True)
    (site / "aws-efa-installer" / "efa_installer.sh").write_text("#!/bin/sh\n")
    archive = site / "aws-efa-installer-1.0.0.tar.gz"
    subprocess.run(["tar", "czf", archive, "-C", site, "aws-efa-installer"], check=True)
    # Whoever replaces the archive may add a key of his own to the published ones
    subprocess.run([*gpg, "--export", "-o", site / "aws-efa-installer.key"], check=True)

    def fetched(signer: str, sha256: str = "") -> bool:
        sign = ["-u", signer, "-o", f"{archive}.sig", "--detach-sign", archive]
        subprocess.run([*gpg, *sign], check=True)
        place = tmp_path / "place"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        script = DOCKERFILE.parent / "fetch_efa.sh"
        words = ["sh", script, "1.0.0", fingerprints[0], sha256, site.as_uri()]
        done = subprocess.run(words, cwd=place, capture_output=True)
        unpacked = (place / "aws-efa-installer").exists()
        assert unpacked == (done.returncode == 0)
        return unpacked

    assert fetched("publisher")
    assert fetched("publisher", hashlib.sha256(archive.read_bytes()).hexdigest())
    assert not fetched("publisher", "0" * 64)
    assert not fetched("stranger")
    kill = ["gpgconf", "--homedir", str(home), "--kill", "all"]
    subprocess.run(kill, check=True)


def test_the_image_runs_without_root_and_reaps_zombies(steps: list[tuple[str, str]]) -> None:
    assert [rest for name, rest in steps if name == "USER"][-1] == "ebbflow"
    assert steps.index(("USER", "ebbflow")) > max(
        at for at, (name, _) in enumerate(steps) if name in ("RUN", "COPY")
    )
    assert "tini" in of(steps, "ENTRYPOINT")[-1]
    assert "tini" in next(rest for rest in of(steps, "RUN") if "apt-get install" in rest)


def test_the_image_has_no_secrets_and_allows_sockets(
    steps: list[tuple[str, str]],
) -> None:
    environment = " ".join(of(steps, "ENV"))
    assert "METAFLOW_SKIP_INSTALL_DEPENDENCIES=1" in environment, (
        "no container installs anything as it starts"
    )
    assert "FI_PROVIDER" not in environment and "NCCL_SOCKET_IFNAME" not in environment
    assert not re.search(r"(?i)secret|token|password|AWS_ACCESS", DOCKERFILE.read_text())


def lint(recipe: str) -> set[str]:
    """The rules of hadolint that a recipe breaks, by their numbers; those that matter for this
    image.
    """
    joined = re.sub(
        r"\\\n\s*",
        " ",
        "\n".join(line for line in recipe.splitlines() if not line.lstrip().startswith("#")),
    )
    lines = [line.strip() for line in joined.splitlines() if line.strip()]
    runs = [line for line in lines if line.startswith("RUN ")]
    user = [line.split()[1] for line in lines if line.startswith("USER ")][-1:]
    installs = []
    for run in runs:
        installs += [part for part in re.split(r"&&|;", run) if "apt-get install" in part]
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    named = dict(
        line[4:].split("=", 1) for line in lines if line.startswith("ARG ") and "=" in line
    )
    bases = [named.get(base.strip("${}"), base) for base in bases]
    found = {
        "DL3000": any(
            line.startswith("WORKDIR ") and not line.split()[1].startswith("/") for line in lines
        ),
        "DL3002": user in ([], ["root"], ["0"]),
        "DL3004": any(re.search(r"\bsudo\b", run) for run in runs),
        "DL3006": any(":" not in base and "@" not in base for base in bases),
        "DL3007": any(base.endswith(":latest") for base in bases),
        "DL3009": any(
            "apt-get update" in run
            and "rm -rf /var/lib/apt/lists" not in run.replace("/tmp/efa ", "")
            for run in runs
        ),
        "DL3014": any(" -y" not in part for part in installs),
        "DL3015": any("--no-install-recommends" not in part for part in installs),
        "DL3020": any(line.startswith("ADD ") for line in lines),
        "DL3025": any(re.match(r"(CMD|ENTRYPOINT) [^[]", line) for line in lines),
        "DL3027": any(re.search(r"\bapt (install|update)", run) for run in runs),
        "DL3042": any("pip install" in run and "--no-cache-dir" not in run for run in runs),
        "DL3045": any(
            line.startswith("COPY ") and not line.split()[-1].startswith("/")
            for line in before_workdir(lines)
        ),
        "DL4000": any(line.startswith("MAINTAINER") for line in lines),
    }
    return {rule for rule, broken in found.items() if broken}


def before_workdir(lines: list[str]) -> list[str]:
    at = next(
        (number for number, line in enumerate(lines) if line.startswith("WORKDIR ")), len(lines)
    )
    return lines[:at]


def test_a_linter_finds_nothing_in_it_and_something_in_a_careless_one() -> None:
    assert lint(DOCKERFILE.read_text()) == set()
    careless = """FROM ubuntu
ADD https://example.com/x.tar /x
COPY here there
RUN sudo apt-get update && apt-get install g++
RUN pip install torch && apt install vim
WORKDIR work
CMD python train.py
MAINTAINER me
"""
    rules = (
        "DL3000 DL3002 DL3004 DL3006 DL3009 DL3014 DL3015 DL3020 DL3025 DL3027 DL3042 DL3045 DL4000"
    )
    assert lint(careless) == set(rules.split())
    assert lint(careless.replace("FROM ubuntu", "FROM ubuntu:latest")) == (
        set(rules.split()) - {"DL3006"}
    ) | {"DL3007"}


@pytest.mark.parametrize("push", ["yes", "no"])
def test_the_build_script_pins_both_bases_logs_in_and_pushes(tmp_path: Path, push: str) -> None:
    """Run the script with commands that record what they are asked."""
    digest = "sha256:" + "a" * 64
    (tmp_path / "docker").write_text(
        f'#!/bin/bash\necho "docker $*" >> {tmp_path}/asked\n'
        f'if [ -f requirements.txt ]; then echo "$PWD" >> {tmp_path}/contexts; fi\n'
        f'case "$*" in *imagetools*) echo {digest};; *login*) cat > /dev/null;; esac\n'
    )
    (tmp_path / "aws").write_text(f'#!/bin/bash\necho "aws $*" >> {tmp_path}/asked\n')
    for name in ("docker", "aws"):
        (tmp_path / name).chmod(0o755)
    script = DOCKERFILE.with_name("build.sh")
    image = "1234.dkr.ecr.eu-west-1.amazonaws.com/ebbflow:v2"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PUSH": push}
    nameless = subprocess.run(
        ["bash", script], env=environment, capture_output=True, text=True, check=False
    )
    assert nameless.returncode == 2 and "METAFLOW_BATCH_CONTAINER_IMAGE" in nameless.stderr
    subprocess.run(
        ["bash", script, image, "--build-arg", "EFA_INSTALLER=1.37.0"], env=environment, check=True
    )
    asked = (tmp_path / "asked").read_text()
    build = asked.splitlines()[-1]
    for base in ("CUDA_IMAGE=nvidia/cuda:", "PYTHON_IMAGE=python:"):
        assert re.search(rf"--build-arg {base}\S+@{digest} ", build), build
    assert f"--tag {image} " in build and "--provenance=false" in build
    assert build.endswith(" --build-arg EFA_INSTALLER=1.37.0 .")
    context = (tmp_path / "contexts").read_text().splitlines()[-1]
    assert context == str(ROOT), "COPY needs requirements.txt"
    assert ("--push" in build) is (push == "yes") is ("aws ecr get-login" in asked)
    assert push == "no" or "--region eu-west-1" in asked
