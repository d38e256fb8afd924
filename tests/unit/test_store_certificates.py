"""A store behind a private certificate authority: AWS_CA_BUNDLE is used as boto3 uses it, and a
refused certificate is named.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ebbflow.core.errors import StoreMisconfigured, StoreUnavailable
from ebbflow.core.store import Store


class Answer(BaseHTTPRequestHandler):
    """A server whose every object is "hi"."""

    def do_GET(self) -> None:
        self.send_response(200)
        headers = {
            "Content-Length": "2",
            "ETag": '"x"',
            "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"hi")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for localhost, with its key beside it."""
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "ca.pem").write_bytes(certificate.public_bytes(pem))
    (folder / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder


@pytest.fixture
def endpoint(authority: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "ca.pem", authority / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in (("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
    address = f"https://localhost:{server.server_port}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    yield address
    server.shutdown()


def read() -> bytes:
    return bytes(Store.open("s3://bucket/p", request_timeout_seconds=5).get("key"))


@pytest.mark.parametrize("variable", ["AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"])
def test_the_private_authority_of_the_bundle_is_trusted(
    endpoint: str, authority: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, str(authority / "ca.pem"))
    assert read() == b"hi"


def test_an_unknown_authority_is_named_with_the_fix(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    with pytest.raises(StoreUnavailable) as refused:
        read()
    said = str(refused.value)
    assert "the certificate is " in said and "AWS_CA_BUNDLE" in said and endpoint in said


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file or directory"), (b"no certificate", "which has no certificate")],
)
def test_a_bundle_that_cannot_be_used_is_one_line(
    endpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes | None,
    words: str,
) -> None:
    bundle = tmp_path / "bundle.pem"
    if content is not None:
        bundle.write_bytes(content)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    with pytest.raises(StoreMisconfigured, match=words) as refused:
        read()
    assert str(refused.value).startswith(f"AWS_CA_BUNDLE names {bundle}")
