"""Keys, region and endpoint are found where every AWS tool finds them, and only then is an SDK
loaded.
"""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ebbflow.core.errors import StoreError, StoreForbidden, StoreMisconfigured, StoreUnavailable
from ebbflow.core.store import Store
from ebbflow.core.store.multipart.requests import S3Account, find_account
from tests.support.faulty_s3 import Fault, closed_port, faulty_s3, swallowing_port
from tests.support.flow import ROOT
from tests.support.swift import Swift


@dataclass
class Container:
    """What the endpoint does once the event is set: it refuses, or it keeps silent."""

    revoked: threading.Event = field(default_factory=threading.Event)
    silent: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without an .aws folder, on a machine that is no instance."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return tmp_path


def shared_files(home: Path, *, config: str = "", credentials: str = "") -> None:
    (home / ".aws").mkdir()
    (home / ".aws" / "config").write_text(config)
    (home / ".aws" / "credentials").write_text(credentials)


def credentials_of(swift: Swift, profile: str) -> str:
    return (
        f"[{profile}]\naws_access_key_id = {swift.access_key}\naws_secret_access_key = "
        f"{swift.secret_key}\n"
    )


def can_write(bucket: str) -> bool:
    store = Store.open(f"s3://{bucket}/prefix", request_timeout_seconds=20)
    store.put("k", b"1")
    return store.get("k") == b"1"


def test_keys_and_endpoint_of_the_default_profile(swift: Swift, home: Path) -> None:
    shared_files(
        home,
        config=f"[default]\nendpoint_url = {swift.endpoint}\n",
        credentials=credentials_of(swift, "default"),
    )
    assert can_write(swift.new_bucket())


def test_a_named_profile_with_a_services_section(
    swift: Swift, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = swift.new_bucket()
    services = f"[services ours]\ns3 =\n  endpoint_url = {swift.endpoint}\n"
    config = f"[profile lab]\nregion = us-east-1\nservices = ours\n{services}"
    shared_files(home, config=config, credentials=credentials_of(swift, "lab"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    account = find_account()()  # saves in parts ask the same place with the same keys
    assert account == S3Account("us-east-1", swift.endpoint, swift.access_key, swift.secret_key)
    assert can_write(bucket)


def test_the_environment_goes_before_the_profile(
    swift: Swift, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = "[default]\naws_access_key_id = nobody\naws_secret_access_key = nothing\n"
    shared_files(
        home,
        config="[default]\nendpoint_url = http://no-such-host.invalid\nregion = nowhere\n",
        credentials=bad,
    )
    for name, value in swift.environment().items():
        monkeypatch.setenv(name, value)
    assert can_write(swift.new_bucket())


@pytest.fixture
def container(swift: Swift, monkeypatch: pytest.MonkeyPatch) -> Iterator[Container]:
    """The credentials endpoint that a container of ECS or Batch has.

    What it gives expires within a minute, so that it is asked again for every store and every few
    requests.
    """
    state = Container()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if state.silent.is_set():
                state.ended.wait(30)
            answer = {
                "AccessKeyId": swift.access_key,
                "SecretAccessKey": swift.secret_key,
                "Token": "",
                "Expiration": (datetime.now(UTC) + timedelta(minutes=1)).isoformat(),
            }
            self.send_response(403 if state.revoked.is_set() else 200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    monkeypatch.setenv(
        "AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{server.server_port}/role"
    )
    yield state
    state.ended.set()
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("container")
def test_the_role_of_a_container(swift: Swift, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", swift.endpoint)
    assert can_write(swift.new_bucket())


def test_a_role_that_is_taken_away(
    swift: Swift, container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", swift.endpoint)
    store = Store.open(f"s3://{swift.new_bucket()}", request_timeout_seconds=20)
    container.revoked.set()
    with pytest.raises(
        StoreForbidden, match=r"^put s3://.*: the credentials could not be renewed: .*; fix: renew"
    ):
        store.put("k", b"1")


def test_a_renewal_that_hangs(container: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", closed_port())
    store = Store.open("s3://bucket", request_timeout_seconds=0.5)
    container.silent.set()
    with pytest.raises(
        StoreUnavailable,
        match=r"^get s3://bucket/k: .* credentials did not answer within 0\.5 s; fix: ",
    ):
        store.get("k")


def test_no_credentials_anywhere() -> None:
    with pytest.raises(
        StoreForbidden, match=r"no AWS credentials: none in .*; fix: set AWS_ACCESS_KEY_ID"
    ):
        Store.open("s3://bucket/prefix")


def test_a_profile_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(
        StoreForbidden, match=r"profile \(nobody\) could not be found; fix: AWS_PROFILE"
    ):
        Store.open("s3://bucket/prefix")


def test_a_role_that_may_not_be_assumed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    role = (
        "role_arn = arn:aws:iam::123456789012:role/trainer\nsource_profile = base\nregion = "
        "us-east-1\n"
    )
    shared_files(
        home,
        config=f"[default]\n{role}",
        credentials="[base]\naws_access_key_id = a\naws_secret_access_key = b\n",
    )
    with faulty_s3(Fault(403, "AccessDenied")) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", endpoint)
        with pytest.raises(StoreForbidden, match=r"no AWS credentials: .* AssumeRole .*; fix: "):
            Store.open("s3://bucket/prefix")


def test_an_endpoint_that_is_given_and_to_be_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://no-such-host.invalid")
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    with pytest.raises(
        StoreMisconfigured, match="contradicts AWS_ENDPOINT_URL; fix: unset one of them"
    ):
        Store.open("s3://bucket/prefix")


def test_a_damaged_configuration_file(home: Path) -> None:
    shared_files(home, config="no section\n")
    with pytest.raises(StoreError, match=r"/\.aws/config cannot be read: .*; fix: correct it"):
        Store.open("s3://bucket/prefix")


def test_a_source_of_credentials_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    with swallowing_port() as endpoint:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{endpoint}/role")
        with pytest.raises(StoreUnavailable, match=r"credentials did not answer within 0\.5 s"):
            Store.open("s3://bucket/prefix", request_timeout_seconds=0.5)


def test_the_path_carries_the_bucket_where_the_endpoint_is_not_amazons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")
    fault = Fault(403)
    with faulty_s3(fault) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://no-such-host.invalid")
        with pytest.raises(StoreForbidden):
            Store.open("s3://bucket.with.dots/prefix").put("k", b"")
    assert fault.requests == ["PUT /bucket.with.dots/prefix/k"]


def test_keys_in_the_environment_load_no_sdk() -> None:
    code = (
        "import sys; from ebbflow.core.store import Store; Store.open('s3://b/p'); "
        "print('botocore' in sys.modules)"
    )
    environment = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "False", done.stdout + done.stderr
