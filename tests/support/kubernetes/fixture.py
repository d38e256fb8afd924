"""The local cluster as a test sees it: a process of its own, a kubeconfig, and the door that
changes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_service import ask_service, run_service

_POD = Path(__file__).with_name("pod.py")
HEAD = "head-token"


@dataclass(frozen=True)
class LocalCluster:
    """A running local cluster. folder: where its pods run."""

    endpoint: str
    folder: Path

    def kubeconfig(self, *, token: str = HEAD, server: str = "") -> Path:
        path = self.folder.parent / f"kubeconfig-{token}"
        context = {"cluster": "local", "user": "local", "namespace": "ebbflow"}
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "local",
                    "clusters": [{"name": "local", "cluster": {"server": server or self.endpoint}}],
                    "users": [{"name": "local", "user": {"token": token}}],
                    "contexts": [{"name": "local", "context": context}],
                }
            )
        )
        return path

    def change(self, **settings: Any) -> None:
        self.ask("settings", settings)

    def items(self, resource: str) -> list[dict[str, Any]]:
        return self.ask(resource, {})["items"]

    def training_pods(self, phase: str = "Running") -> list[dict[str, Any]]:
        """Node 0's first."""
        mark = "jobset.sigs.k8s.io/replicatedjob-name"
        found = [
            pod
            for pod in self.items("pods")
            if (pod["metadata"].get("labels") or {}).get(mark) and pod["status"]["phase"] == phase
        ]
        return sorted(found, key=lambda one: one["metadata"]["labels"][mark])

    def past(self) -> dict[str, list[dict[str, Any]]]:
        return self.ask("past", {})

    def told(self) -> dict[str, Any]:
        return self.ask("told", {})

    def outputs(self) -> str:
        """What all pods wrote, for the message of a test that failed."""
        texts = []
        for path in sorted(self.folder.glob("*/output.log")):
            texts.append(f"--- {path.parent.name}\n{path.read_text(errors='replace')[-6000:]}")
        return "\n".join(texts)

    def ask(self, path: str, document: dict[str, Any]) -> dict[str, Any]:
        return ask_service(self.endpoint, path, document)


@contextlib.contextmanager
def local_cluster(folder: Path, **settings: Any) -> Iterator[LocalCluster]:
    """Run one until the end of the block; its pods end with it.

    Skips a test where pods can have no namespaces.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hosts").write_text("127.0.0.1 localhost\n")
    words = [
        str(os.getpid()),
        str(folder / "hosts"),
        "pod",
        str(min(os.sched_getaffinity(0))),
        "true",
    ]
    done = subprocess.run(
        [sys.executable, "-S", str(_POD), *words], capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        pytest.skip(f"no namespaces for pods here: {done.stderr[-200:]}")
    log = folder / "server.log"
    with run_service("tests.support.kubernetes", folder / "pods", log, settings) as endpoint:
        yield LocalCluster(endpoint, folder / "pods")
