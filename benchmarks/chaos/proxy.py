"""A TCP proxy that misbehaves on request, as a faulty network between two agents does."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Sequence
from enum import StrEnum

_BUFFER = 65536
_LOOK_SECONDS = 0.05
_CONNECT_SECONDS = 5.0


class Conduct(StrEnum):
    """What the proxy does with the bytes that it receives."""

    PASS = "pass"
    DELAY = "delay"  # each piece arrives `delay_seconds` late
    DROP = "drop"  # both ends are closed in order, and again at each new try
    RESET = "reset"  # the same with a reset, as from a firewall or a host that was restarted
    BLACKHOLE = "blackhole"  # nothing arrives any more, in either direction


class FaultProxy:
    """Listens on a free port of this machine and passes connections on to the first of `targets`
    that answers.

    Threads of its own carry the bytes; `close` ends them within a second.
    """

    def __init__(self, targets: Sequence[tuple[str, int]], *, delay_seconds: float = 0.2) -> None:
        self.conduct = Conduct.PASS
        self._targets = list(targets)
        self._delay_seconds = delay_seconds
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_LOOK_SECONDS)
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, name="fault proxy", daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._closed.set()
        self._listener.close()
        for thread in list(self._threads):
            thread.join(1.0)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            server = self._connect()
            if server is None:
                client.close()
                continue
            for source, sink in ((client, server), (server, client)):
                thread = threading.Thread(
                    target=self._carry, args=(source, sink), name="fault proxy", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _connect(self) -> socket.socket | None:
        for target in self._targets:
            with contextlib.suppress(OSError):
                return socket.create_connection(target, timeout=_CONNECT_SECONDS)
        return None

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        source.settimeout(_LOOK_SECONDS)
        try:
            while not self._closed.is_set() and self.conduct not in (Conduct.DROP, Conduct.RESET):
                try:
                    data = source.recv(_BUFFER)
                except TimeoutError:
                    continue
                if not data:
                    return
                self._deliver(data, sink)
        except OSError:
            return
        finally:
            for end in (source, sink):
                if self.conduct is Conduct.RESET:
                    with contextlib.suppress(OSError):
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.close()

    def _deliver(self, data: bytes, sink: socket.socket) -> None:
        if self.conduct is Conduct.BLACKHOLE:
            return
        if self.conduct is Conduct.DELAY:
            time.sleep(self._delay_seconds)
        sink.sendall(data)
