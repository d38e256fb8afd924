"""OpenStack Swift with its S3 interface in one process: a real object store, without root,
memcached or a container.

    python -m tests.support.swift_server FOLDER PARENT_PID

Everything of it lies in FOLDER. Prints one line of JSON, {"endpoint": …, "access_key": …,
"secret_key": …}, once it answers, and lives until its parent ends. Proxy, account, container and
object server run side by side in green threads, each behind a port of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ACCESS_KEY = "test:tester"
SECRET_KEY = "store-password-4d1f7a90c2"
OTHER_KEY = "test:reader"
_STORAGE = ("account", "container", "object")
_SWIFT_CONF = """[swift-hash]
swift_hash_path_suffix = ebbflow
[storage-policy:0]
name = only
default = yes
"""
_COMMON = """[DEFAULT]
swift_dir = {folder}
devices = {folder}/devices
recon_cache_path = {folder}/recon
mount_check = false
bind_ip = 127.0.0.1
bind_port = {port}
log_level = WARNING
"""
# A listing is updated in the put itself unless that takes longer than container_update_timeout:
# there is no updater process here that would bring it up later.
_STORAGE_APP = """[pipeline:main]
pipeline = app
[app:app]
use = egg:swift#{name}
container_update_timeout = 20
fallocate_reserve = 0
"""
_PROXY_APP = f"""[pipeline:main]
pipeline = catch_errors gatekeeper healthcheck cache bulk s3api tempauth copy container-quotas slo dlo
    versioned_writes symlink proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
node_timeout = 30
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:gatekeeper]
use = egg:swift#gatekeeper
[filter:healthcheck]
use = egg:swift#healthcheck
[filter:cache]
paste.filter_factory = tests.support.swift_server:cache_factory
[filter:bulk]
use = egg:swift#bulk
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
# Far less than the 1,000 of S3, so that what is listed comes in several answers.
max_bucket_listing = 20
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = {SECRET_KEY} .admin
user_test_reader = reading
[filter:copy]
use = egg:swift#copy
[filter:container-quotas]
use = egg:swift#container_quotas
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
[filter:versioned_writes]
use = egg:swift#versioned_writes
[filter:symlink]
use = egg:swift#symlink
"""


class Cache:
    """What Swift asks of memcached, in memory."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[float, Any]] = {}

    def get(self, key: str, **_: Any) -> Any:
        until, value = self._entries.get(key, (0.0, None))
        if until > time.monotonic():
            return value
        return None

    def set(self, key: str, value: Any, time: float = 0, **_: Any) -> None:
        self._entries[key] = (_now() + (time or 3600), json.loads(json.dumps(value)))

    def delete(self, key: str, **_: Any) -> None:
        self._entries.pop(key, None)


def cache_factory(*_: Any, **__: Any) -> Any:
    """A Paste filter that gives each request the one cache."""
    cache = Cache()

    def wrap(app: Any) -> Any:
        def serve(environ: dict, start_response: Any) -> Any:
            environ["swift.cache"] = cache
            return app(environ, start_response)

        return serve

    return wrap


def main(folder: Path, parent_pid: int) -> None:
    from ebbflow.core.process import die_with_parent

    die_with_parent(parent_pid)
    import eventlet

    eventlet.monkey_patch(all=False, socket=True, select=True, thread=True)
    sockets = {name: eventlet.listen(("127.0.0.1", 0)) for name in ("proxy", *_STORAGE)}
    ports = {name: sock.getsockname()[1] for name, sock in sockets.items()}
    _write_configuration(folder, ports)
    _serve(folder, sockets)
    keys = {"access_key": ACCESS_KEY, "secret_key": SECRET_KEY}
    print(json.dumps({"endpoint": f"http://127.0.0.1:{ports['proxy']}", **keys}), flush=True)
    while True:
        eventlet.sleep(3600)


def _write_configuration(folder: Path, ports: dict[str, int]) -> None:
    for name in ("devices/d1", "recon"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "swift.conf").write_text(_SWIFT_CONF)
    for name, port in ports.items():
        if name == "proxy":
            app = _PROXY_APP
        else:
            app = _STORAGE_APP.format(name=name)
        (folder / f"{name}.conf").write_text(_COMMON.format(folder=folder, port=port) + app)


def _serve(folder: Path, sockets: dict[str, Any]) -> None:
    import eventlet.wsgi
    from swift.common.http_protocol import SwiftHttpProtocol
    from swift.common.ring import RingBuilder
    from swift.common.utils import NullLogger, set_swift_dir
    from swift.common.wsgi import loadapp

    set_swift_dir(str(folder))
    for name in _STORAGE:
        builder = RingBuilder(part_power=4, replicas=1, min_part_hours=0)
        port = sockets[name].getsockname()[1]
        place = {
            "region": 1,
            "zone": 1,
            "weight": 1,
            "ip": "127.0.0.1",
            "port": port,
            "device": "d1",
        }
        builder.add_dev(place)
        builder.rebalance()
        builder.get_ring().save(str(folder / f"{name}.ring.gz"))
    for name, sock in sockets.items():
        app = loadapp(str(folder / f"{name}.conf"), global_conf={"log_name": name})
        settings = {
            "protocol": SwiftHttpProtocol,
            "socket_timeout": 60,
            "capitalize_response_headers": False,
        }
        eventlet.spawn(eventlet.wsgi.server, sock, app, NullLogger(), **settings).link(_end)


def _end(server: Any) -> None:
    """One server that ends takes all along: half a store would leave its users waiting."""
    try:
        server.wait()
    finally:
        os._exit(1)


def _now() -> float:
    return time.monotonic()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
