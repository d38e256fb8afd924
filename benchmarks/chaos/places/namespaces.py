"""Two nodes in network namespaces of their own, joined by a pair of virtual interfaces that can be
pulled apart.

Each has its own host name, hosts file and half of the cores, as two machines have; the file system
is shared, as the store is. Other than at the proxy, packets of agents and of ranks are lost alike.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from benchmarks.chaos.places.place import Place, needs_tools, run_tool
from ebbflow.training.errors import GangError

_NODES = (0, 1)
_ADDRESSES = ("10.213.7.1", "10.213.7.2")  # seen by these two namespaces alone
_INTERFACE = "eth0"
_ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
_TOOLS = ("ip", "nsenter", "unshare", "mount", "hostname", "taskset")


class Namespaces(Place):
    """Needs root and mounts of this process's own; the namespaces go with `take_down`, or with this
    process.
    """

    proxied = False
    own_mounts = True
    main_address = _ADDRESSES[0]

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._names = [f"ebbflow-{os.getpid()}-{node}" for node in _NODES]

    @classmethod
    def missing(cls) -> str:
        return needs_tools(_TOOLS, root=True)

    def set_up(self) -> None:
        one, other = self._names
        for name in self._names:
            run_tool(["ip", "netns", "add", name])
        run_tool(
            [
                "ip",
                "-n",
                one,
                "link",
                "add",
                _INTERFACE,
                "type",
                "veth",
                "peer",
                "name",
                _INTERFACE,
                "netns",
                other,
            ]
        )
        for name, address in zip(self._names, _ADDRESSES, strict=True):
            run_tool(["ip", "-n", name, "address", "add", f"{address}/30", "dev", _INTERFACE])
            run_tool(["ip", "-n", name, "link", "set", "lo", "up"])
            run_tool(["ip", "-n", name, "link", "set", _INTERFACE, "up"])
        names = "".join(f"{address} {_host(node)}\n" for node, address in enumerate(_ADDRESSES))
        self._hosts.write_text(f"127.0.0.1 localhost\n{names}")

    def take_down(self) -> None:
        for name in self._names:
            with contextlib.suppress(GangError):
                run_tool(["ip", "netns", "delete", name])

    def command(self, node: int) -> list[str]:
        cores = sorted(os.sched_getaffinity(0))
        own = cores[node :: len(_NODES)] or cores
        return [
            *("nsenter", f"--net=/run/netns/{self._names[node]}"),
            *("unshare", "--uts", "--mount", "--propagation", "private"),
            *("taskset", "--cpu-list", ",".join(map(str, own))),
            *("sh", "-c", _ENTER, _host(node), str(self._hosts)),
        ]

    def link(self, *, up: bool) -> None:
        """Plugs the cable between the two in, or pulls it out."""
        run_tool(["ip", "-n", self._names[1], "link", "set", _INTERFACE, "up" if up else "down"])

    @property
    def _hosts(self) -> Path:
        return self.folder / "hosts"


def _host(node: int) -> str:
    return f"ebbflow-node-{node}"
