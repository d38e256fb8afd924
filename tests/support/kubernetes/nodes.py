"""Nodes of the pools: made for pods that need one, told of their end, lost."""

from __future__ import annotations

import itertools
import time
from typing import Any

from tests.support.batch.instances import Instance
from tests.support.kubernetes.settings import Pool, Settings
from tests.support.kubernetes.store import Object, ObjectStore, timestamp

SYSTEM = "system-1"
_UNITS = {
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "m": 1e-3,
    "": 1.0,
}


class Machine:
    """A node and the instance below it.

    `gone_at`: time.monotonic() of its end; None while none is known.
    """

    def __init__(self, name: str, pool: Pool, address: str) -> None:
        self.name = name
        self.pool = pool
        self.address = address
        if pool.market == "spot":
            market = "ec2-spot"
        else:
            market = "ec2"
        self.instance = Instance(pool.instance_type, pool.zone, market)
        self.ready_at = self.empty_since = time.monotonic()
        self.lost_at: float | None = None
        self.made = time.time()
        self.ended = 0.0

    def tell_its_end(self, seconds: float, *, notice: bool) -> None:
        self.instance.reclaim(seconds, notice=notice)


class Nodes:
    """All machines, also those that have gone: what the cluster would be billed for."""

    def __init__(self, settings: Settings, store: ObjectStore) -> None:
        self._settings = settings
        self._store = store
        self._numbers = itertools.count(1)
        self.machines: dict[str, Machine] = {}
        self.past: list[dict[str, Any]] = []
        self._store.create(
            "nodes",
            "",
            self._document(SYSTEM, {"node-role": "system"}, [], 64.0, 64e9, 0, "127.0.0.1"),
        )

    def place(self, pod: Object, pods: list[Object]) -> tuple[str | None, str]:
        """The node for a pod, which may have to be made first; or None and why it waits, in the
        scheduler's words.
        """
        selector = pod["spec"].get("nodeSelector") or {}
        need = requests_of(pod)
        for node in self._store.all("nodes"):
            name = node["metadata"]["name"]
            machine = self.machines.get(name)
            if machine and (
                machine.lost_at or machine.instance.ends_at or time.monotonic() < machine.ready_at
            ):
                continue
            labels = node["metadata"]["labels"]
            if not selector.items() <= labels.items() or not self._tolerates(
                pod, node["spec"].get("taints") or []
            ):
                continue
            if self._fits(
                need, node, [placed for placed in pods if placed["spec"].get("nodeName") == name]
            ):
                return name, ""
        starting = any(time.monotonic() < booting.ready_at for booting in self.machines.values())
        for pool in self._settings.pools:
            if not selector.items() <= pool.node_labels().items() or not self._tolerates(
                pod, pool.taints()
            ):
                continue
            # Karpenter knows the GPUs of a type, whether or not its nodes will register them
            if need.get("nvidia.com/gpu", 0) > (pool.gpus if self._settings.device_plugin else 0):
                continue
            if need.get("cpu", 0) > pool.cpus or need.get("memory", 0) > pool.memory_mib * 2**20:
                continue
            used = sum(running.pool.name == pool.name for running in self.machines.values())
            if not starting and used < pool.size:
                self._make(pool)
                starting = True
        nodes = len(self._store.all("nodes"))
        return None, (
            f"0/{nodes} nodes are available: {nodes} node(s) didn't match Pod's node "
            f"affinity/selector. preemption: 0/{nodes} nodes are available: {nodes} Preemption "
            "is not helpful for scheduling."
        )

    def _make(self, pool: Pool) -> None:
        number = next(self._numbers)
        name = f"ip-10-0-{number // 250}-{number % 250}"
        machine = self.machines[name] = Machine(
            name, pool, f"127.9.{number // 250}.{number % 250 + 1}"
        )
        machine.ready_at += self._settings.node_seconds
        document = self._document(
            name,
            pool.node_labels(),
            pool.taints(),
            pool.cpus,
            pool.memory_mib * 2**20,
            pool.gpus if pool.runs_device_plugin() else 0,
            machine.address,
        )
        document["spec"]["providerID"] = f"aws:///{pool.zone}/{machine.instance.id}"
        self._store.create("nodes", "", document)

    def _document(
        self,
        name: str,
        labels: dict[str, str],
        taints: list[Any],
        cpus: float,
        memory: float,
        gpus: int,
        address: str,
    ) -> Object:
        room: dict[str, str] = {"cpu": f"{cpus:g}", "memory": f"{memory:.0f}", "pods": "110"}
        if gpus and self._settings.device_plugin:
            room["nvidia.com/gpu"] = str(gpus)
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "lastTransitionTime": timestamp(),
            "lastHeartbeatTime": timestamp(),
            "message": "kubelet is posting ready status",
        }
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}},
            "spec": {"taints": taints},
            "status": {
                "allocatable": room,
                "capacity": room,
                "conditions": [ready],
                "addresses": [{"type": "InternalIP", "address": address}],
            },
        }

    def _tolerates(self, pod: Object, taints: list[dict[str, str]]) -> bool:
        tolerations = pod["spec"].get("tolerations") or []

        def covered(taint: dict[str, str]) -> bool:
            return any(
                (not toleration.get("key") or toleration["key"] == taint["key"])
                and toleration.get("effect") in (None, "", taint["effect"])
                and (
                    toleration.get("operator") == "Exists"
                    or toleration.get("value", "") == taint.get("value", "")
                )
                for toleration in tolerations
            )

        return all(
            covered(taint) for taint in taints if taint["effect"] in ("NoSchedule", "NoExecute")
        )

    def _fits(self, need: dict[str, float], node: Object, pods: list[Object]) -> bool:
        room = node["status"]["allocatable"]
        for name, amount in need.items():
            if name == "ephemeral-storage":
                continue
            used = sum(requests_of(pod).get(name, 0.0) for pod in pods)
            if used + amount > quantity(room.get(name, 0)):
                return False
        return True

    def notice(self, name: str) -> None:
        """EC2 announces the instance's end; Karpenter taints the node and makes no more pods there."""
        self.machines[name].tell_its_end(self._settings.notice_seconds, notice=True)
        taint = {"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}
        self._store.edit(
            "nodes", "", name, lambda node: node["spec"].setdefault("taints", []).append(taint)
        )

    def retire(self, name: str) -> None:
        """The node is no longer there, nor paid for."""
        machine = self.machines.pop(name)
        ended = machine.ended or time.time()
        self.past.append(
            {
                "node": name,
                "type": machine.pool.instance_type,
                "market": machine.pool.market,
                "zone": machine.pool.zone,
                "made": machine.made,
                "ended": ended,
            }
        )
        machine.instance.close()
        self._store.remove("nodes", "", name)


def quantity(text: Any) -> float:
    """A Kubernetes quantity as a number."""
    text = str(text)
    digits = text.rstrip("KMGikm")
    return float(digits) * _UNITS[text[len(digits) :]]


def requests_of(pod: Object) -> dict[str, float]:
    found: dict[str, float] = {}
    for container in pod["spec"]["containers"]:
        resources = container.get("resources") or {}
        for name, value in {
            **(resources.get("limits") or {}),
            **(resources.get("requests") or {}),
        }.items():
            found[name] = found.get(name, 0.0) + quantity(value)
    return found
