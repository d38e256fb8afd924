"""By which interface a node reaches its gang: what gloo and NCCL must be told where a container has several.

In a job of several nodes AWS Batch gives each container an interface of the VPC beside one of the ECS agent, whose
link-local address is the same in all of them. A library that takes the first it finds may wait on that one for ever.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import MutableMapping

_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
_ANY_PORT = 9


def name_interface(main_address: str, environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Tell the libraries of this process's children which interface leads to node 0; what the user has set stands.

    Returns its name; None where none leads there, and then nothing is changed.
    """
    name = interface_to(main_address)
    if name is not None:
        for variable in _VARIABLES:
            environment.setdefault(variable, name)
    return name


def interface_to(address: str) -> str | None:
    """The interface whose own address a connection to `address` (IPv4) would come from. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _ANY_PORT))
        except OSError:
            return None
        own = probe.getsockname()[0]
        return next((name for _, name in socket.if_nameindex() if _address_of(probe, name) == own), None)


def _address_of(probe: socket.socket, name: str) -> str | None:
    request = array.array("B", struct.pack("256s", name.encode()[:15]))
    with contextlib.suppress(OSError):
        fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request, True)
        return socket.inet_ntoa(request.tobytes()[20:24])
    return None
