"""The scheduler and the kubelets: pods get nodes, run as processes, are asked to end, and go with
their node.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.kubernetes.nodes import SYSTEM, Nodes
from tests.support.kubernetes.settings import Settings
from tests.support.kubernetes.store import Object, ObjectStore, timestamp

_POD = Path(__file__).with_name("pod.py")
_OF_THE_MACHINE = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
KILLED = 137


class Container:
    """A pod's command in a folder of its own."""

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        folder: Path,
        hosts: Path,
        hostname: str,
        node: str,
    ) -> None:
        (folder / "tmp").mkdir(parents=True)
        self.folder = folder
        self.started = time.time()
        self.killed_at = float("inf")
        own = {"HOME": str(folder), "PWD": str(folder), "TMPDIR": str(folder / "tmp")}
        with open(folder / "output.log", "w") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-S",
                    str(_POD),
                    str(os.getpid()),
                    str(hosts),
                    hostname,
                    cores_of(node),
                    *command,
                ],
                cwd=folder,
                env={**environment, **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ask_to_end(self, seconds: float) -> None:
        if self.killed_at == float("inf"):
            self.killed_at = time.monotonic() + seconds
            if self.process.poll() is None:
                os.kill(self.process.pid, signal.SIGUSR1)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)


class Kubelet:
    def __init__(self, settings: Settings, store: ObjectStore, nodes: Nodes, folder: Path) -> None:
        self._settings = settings
        self._store = store
        self._nodes = nodes
        self._folder = folder
        self._containers: dict[str, Container] = {}  # by the pod's uid
        self._ends_at: dict[str, float] = {}  # pods that end before they run
        self.past: list[
            dict[str, Any]
        ] = []  # every pod that has run: {pod, labels, node, started, ended, exit_code}
        self._hosts = folder / "hosts"
        folder.mkdir(parents=True, exist_ok=True)
        self._hosts.write_text("127.0.0.1 localhost\n")
        self._hidden_from: set[str] = set()

    def turn(self) -> None:
        pods = self._store.all("pods")
        for pod in pods:
            self._pod(pod, pods)
        self._look_after_nodes()

    def close(self) -> None:
        for container in self._containers.values():
            container.kill()

    def delete(self, pod: Object) -> None:
        """Begin the graceful end."""
        metadata = pod["metadata"]
        if "deletionTimestamp" in metadata:
            return
        grace = pod["spec"].get("terminationGracePeriodSeconds")
        if grace is None:
            grace = 30
        marks = {
            "deletionTimestamp": timestamp(time.time() + grace),
            "deletionGracePeriodSeconds": grace,
        }
        self._store.edit(
            "pods",
            metadata["namespace"],
            metadata["name"],
            lambda one: one["metadata"].update(marks),
        )
        container = self._containers.get(metadata["uid"])
        if container is not None:
            container.ask_to_end(grace)

    def evict(self, pod: Object) -> None:
        mark = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
        metadata = pod["metadata"]
        self._store.edit(
            "pods",
            metadata["namespace"],
            metadata["name"],
            lambda one: one["status"].setdefault("conditions", []).append(mark),
        )
        self.delete(pod)

    def container(self, pod: Object) -> Container | None:
        return self._containers.get(pod["metadata"]["uid"])

    def _pod(self, pod: Object, pods: list[Object]) -> None:
        metadata = pod["metadata"]
        status = pod["status"]
        name = (metadata["namespace"], metadata["name"])
        container = self._containers.get(metadata["uid"])
        node = pod["spec"].get("nodeName")
        if status["phase"] in ("Succeeded", "Failed"):
            if "deletionTimestamp" in metadata:
                self._store.remove("pods", *name)
            return
        if node and node != SYSTEM and node not in self._nodes.machines:
            return
        if node and node in self._nodes.machines and self._nodes.machines[node].lost_at is not None:
            return  # its kubelet reports nothing any more
        if container is None:
            if "deletionTimestamp" in metadata:
                self._store.remove("pods", *name)
            elif not node:
                self._schedule(pod, pods)
            else:
                self._start(pod)
        elif (code := container.process.poll()) is not None:
            self._end(pod, container, code)
        elif time.monotonic() >= container.killed_at:
            container.kill()
            self._end(pod, container, KILLED)
        else:
            limit = pod["spec"].get("activeDeadlineSeconds")
            if limit is not None and time.time() - container.started > limit:
                container.ask_to_end(pod["spec"].get("terminationGracePeriodSeconds", 30))

    def _schedule(self, pod: Object, pods: list[Object]) -> None:
        node, why = self._nodes.place(
            pod, [active for active in pods if active["status"]["phase"] in ("Pending", "Running")]
        )
        metadata = pod["metadata"]
        scheduled: dict[str, Any] = {"type": "PodScheduled", "status": "True" if node else "False"}
        if not node:
            scheduled |= {"reason": "Unschedulable", "message": why}

        def change(one: Object) -> None:
            one["status"]["conditions"] = [scheduled]
            if node:
                one["spec"]["nodeName"] = node
                one["status"] |= {"startTime": timestamp(), "hostIP": self._address(node)}

        if node or not any(
            condition.get("message") == why for condition in pod["status"].get("conditions") or []
        ):
            self._store.edit("pods", metadata["namespace"], metadata["name"], change)
            pod["spec"].update({"nodeName": node} if node else {})

    def _address(self, node: str) -> str:
        if node == SYSTEM:
            return "127.0.0.1"
        return self._nodes.machines[node].address

    def _start(self, pod: Object) -> None:
        metadata = pod["metadata"]
        spec = pod["spec"]
        image = spec["containers"][0]["image"]
        if image in self._settings.missing_images:
            waiting = {
                "reason": "ImagePullBackOff",
                "message": f'Back-off pulling image "{image}": ErrImagePull: pull access denied',
            }
            self._report(pod, "Pending", {"waiting": waiting}, ready=False)
            return
        address = pod["status"]["podIPs"][0]["ip"]
        hostname = spec.get("hostname") or metadata["name"]
        if spec.get("subdomain") and spec.get("hostname"):
            hostname = (
                f"{spec['hostname']}.{spec['subdomain']}.{metadata['namespace']}.svc.cluster.local"
            )
            self._name(hostname, address)
        if len(hostname) > 64 and spec.get("setHostnameAsFQDN"):
            waiting = {
                "reason": "CreateContainerError",
                "message": f"hostname {hostname} is longer than 64 characters",
            }
            self._report(pod, "Pending", {"waiting": waiting}, ready=False)
            return
        container = Container(
            spec["containers"][0].get("command") or ["true"],
            self._environment(pod),
            self._folder / metadata["name"],
            self._hosts,
            hostname,
            spec["nodeName"],
        )
        self._containers[metadata["uid"]] = container
        pod["status"]["podIP"] = address
        self._report(
            pod, "Running", {"running": {"startedAt": timestamp(container.started)}}, ready=True
        )

    def _name(self, hostname: str, address: str) -> None:
        lines = [
            line
            for line in self._hosts.read_text().splitlines()
            if not line.endswith(f" {hostname}")
        ]
        with open(self._hosts, "r+") as file:  # the same file, which pods have mounted
            file.write("\n".join([*lines, f"{address} {hostname}"]) + "\n")
            file.truncate()

    def _environment(self, pod: Object) -> dict[str, str]:
        image = {name: os.environ[name] for name in _OF_THE_MACHINE if name in os.environ}
        image["PATH"] = os.pathsep.join(
            [str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]
        )
        image["METAFLOW_SKIP_INSTALL_DEPENDENCIES"] = "1"  # the image has them
        image["KUBERNETES_SERVICE_HOST"] = "127.0.0.1"
        image["KUBERNETES_SERVICE_PORT"] = "1"
        machine = self._nodes.machines.get(pod["spec"]["nodeName"])
        if machine is not None:
            image["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = machine.instance.metadata_address
        else:
            image["AWS_EC2_METADATA_DISABLED"] = "true"
        own = {}
        for variable in pod["spec"]["containers"][0].get("env") or []:
            if "value" in variable:
                own[variable["name"]] = variable["value"]
            else:
                own[variable["name"]] = self._field(pod, variable["valueFrom"]["fieldRef"])
        return {**image, **self._settings.environment, **own}

    def _field(self, pod: Object, reference: dict[str, str]) -> str:
        path = reference["fieldPath"]
        for kind in ("annotations", "labels"):
            if path.startswith(f"metadata.{kind}['"):
                return (pod["metadata"].get(kind) or {}).get(path.split("'")[1], "")
        found: Any = pod
        for part in path.split("."):
            found = (found or {}).get(part)
        return str(found or "")

    def _report(self, pod: Object, phase: str, state: dict[str, Any], *, ready: bool) -> None:
        metadata = pod["metadata"]
        spec = pod["spec"]
        container = spec["containers"][0]
        line = {
            "name": container["name"],
            "image": container["image"],
            "imageID": "",
            "ready": ready,
            "restartCount": 0,
            "state": state,
            "lastState": {},
            "started": "running" in state,
        }

        def change(one: Object) -> None:
            known = [
                condition
                for condition in one["status"].get("conditions") or []
                if condition["type"] != "Ready"
            ]
            one["status"] |= {
                "phase": phase,
                "containerStatuses": [line],
                "conditions": [*known, {"type": "Ready", "status": "True" if ready else "False"}],
            }
            if "podIP" in pod["status"]:
                one["status"]["podIP"] = pod["status"]["podIP"]

        self._store.edit("pods", metadata["namespace"], metadata["name"], change)

    def _end(self, pod: Object, container: Container, code: int) -> None:
        ended = self._record(pod, container, code)
        terminated = {
            "exitCode": code,
            "reason": "Completed" if code == 0 else "Error",
            "startedAt": timestamp(container.started),
            "finishedAt": timestamp(ended),
        }
        self._report(
            pod, "Succeeded" if code == 0 else "Failed", {"terminated": terminated}, ready=False
        )

    def _record(self, pod: Object, container: Container, code: int | None) -> float:
        """When it ended: now."""
        ended = time.time()
        self.past.append(
            {
                "pod": pod["metadata"]["name"],
                "labels": pod["metadata"]["labels"],
                "node": pod["spec"]["nodeName"],
                "annotations": pod["metadata"]["annotations"],
                "started": container.started,
                "ended": ended,
                "exit_code": code,
            }
        )
        return ended

    # -- nodes

    def lose(self, name: str) -> None:
        """The machine is gone at once, with all that runs on it; the cluster notices later."""
        machine = self._nodes.machines[name]
        machine.lost_at = time.monotonic()
        machine.ended = time.time()
        for pod in self._store.all("pods"):
            if pod["spec"].get("nodeName") == name:
                container = self.container(pod)
            else:
                container = None
            if container is not None and container.process.poll() is None:
                container.kill()
                self._record(pod, container, None)

    def _look_after_nodes(self) -> None:
        now = time.monotonic()
        for name, machine in list(self._nodes.machines.items()):
            if (
                machine.lost_at is None
                and machine.instance.ends_at is not None
                and now >= machine.instance.ends_at
            ):
                self.lose(name)
            pods = [
                placed
                for placed in self._store.all("pods")
                if placed["spec"].get("nodeName") == name
            ]
            if machine.lost_at is not None:
                if now >= machine.lost_at + self._settings.lost_seconds:
                    for pod in pods:
                        self._lost(pod)
                    self._nodes.retire(name)
            elif (
                any(placed["status"]["phase"] in ("Pending", "Running") for placed in pods)
                or now < machine.ready_at + 2
            ):
                machine.empty_since = now
            elif now > machine.empty_since + 1:
                self._nodes.retire(name)

    def _lost(self, pod: Object) -> None:
        """The pod garbage collector's work after the node's object is gone."""
        if pod["status"]["phase"] in ("Succeeded", "Failed"):
            return

        def change(one: Object) -> None:
            one["status"] |= {"phase": "Failed", "reason": "NodeLost", "message": "Node is gone"}
            one["status"]["conditions"] = [
                {
                    "type": "DisruptionTarget",
                    "status": "True",
                    "reason": "DeletionByPodGC",
                    "message": "PodGC: node no longer exists",
                },
            ]
            for line in one["status"].get("containerStatuses") or []:
                line["ready"] = False
                line["state"] = {
                    "terminated": {"exitCode": KILLED, "reason": "ContainerStatusUnknown"}
                }

        self._store.edit("pods", pod["metadata"]["namespace"], pod["metadata"]["name"], change)
        self.delete(pod)


def cores_of(node: str) -> str:
    """Half of this machine's cores, by turns: ranks in two pods then have the threads of two ranks
    beside each other, whose number decides the order of sums."""
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    if node != SYSTEM:
        number = int(node.rpartition("-")[2])
    else:
        number = 0
    if node == SYSTEM:
        mine = cores
    elif number % 2 and len(cores) > 1:
        mine = cores[half : 2 * half]
    else:
        mine = cores[:half]
    return ",".join(map(str, mine))
