"""`ebbflow bundle`: what the archive holds, its size, and that no secret leaves the machine."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import string
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ebbflow.core.layout import KnownJob, generation_key, log_key
from ebbflow.core.rank_logs import LogLine
from ebbflow.core.store import Store
from ebbflow.diagnose.bundle import LARGEST_BYTES, BundleFile, pack, redact, secret_values

_RANDOM = random.Random(7)


def _letters(count: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    return "".join(_RANDOM.choices(alphabet, k=count))


_HEX = "0123456789abcdef"
_UPPER = string.ascii_uppercase + "234567"
_JWT = ".".join(
    base64.urlsafe_b64encode(_letters(30).encode()).decode().rstrip("=") for _ in range(2)
)
_PEM = "\n".join(_letters(64) for _ in range(4))

# kind: (a line as programs print it, the part that must not be in the archive)
SECRETS: dict[str, tuple[str, str]] = {}


def _plant(kind: str, line: str, secret: str) -> None:
    SECRETS[kind] = (line.replace("{}", secret), secret)


_plant("AWS key ID", "using credentials {} from the environment", "AKIA" + _letters(16, _UPPER))
_plant("AWS secret key", "aws_secret_access_key = {}", _letters(38) + "/+")
_plant("AWS secret in JSON", '"SecretAccessKey": "{}",', _letters(40))
_plant("AWS session token", "export AWS_SESSION_TOKEN={}", "IQoJ" + _letters(200))
_plant(
    "signed address",
    "GET https://b.s3.amazonaws.com/k?X-Amz-Date=20260101&X-Amz-Signature={}&x=1",
    _letters(64, _HEX),
)
_plant(
    "signed address, old",
    "https://b.s3.amazonaws.com/k?AWSAccessKeyId=x&Signature={}&Expires=1",
    _letters(27) + "=",
)
_plant("Azure SAS", "https://a.blob.core.windows.net/c?sv=2024&sig={}&se=2026", _letters(43))
_plant(
    "Azure account key",
    "DefaultEndpointsProtocol=https;AccountName=a;AccountKey={};",
    _letters(86) + "==",
)
_plant("GitHub token", "remote: https://{}@github.com/a/b", "ghp_" + _letters(36))
_plant("GitHub fine-grained", "token is {}.", "github_pat_" + _letters(60))
_plant("GitLab token", "PRIVATE-TOKEN: {}", "glpat-" + _letters(20))
_plant("Hugging Face", "Logged in with {}", "hf_" + _letters(34))
_plant("OpenAI", "Incorrect API key provided: {}", "sk-proj-" + _letters(48))
_plant("Anthropic", "x-api-key: {}", "sk-ant-api03-" + _letters(60))
_plant("Slack token", "slack: {}", "xoxb-" + _letters(12, string.digits) + "-" + _letters(24))
_plant(
    "Slack webhook",
    "POST https://hooks.slack.com/services/{}",
    f"T{_letters(8)}/B{_letters(8)}/{_letters(24)}",
)
_plant(
    "Discord webhook",
    "https://discord.com/api/webhooks/{} 204",
    _letters(18, string.digits) + "/" + _letters(60),
)
_plant("Google API key", "key {} is not valid", "AIza" + _letters(35))
_plant("Google OAuth", "got {}", "ya29." + _letters(60))
_plant("JWT", "claims of {} expired", "eyJhbGciOiJIUzI1NiJ9." + _JWT)
_plant("bearer", "> Authorization: Bearer {}", _letters(40))
_plant(
    "basic",
    "> authorization: Basic {}",
    base64.b64encode(b"user:" + _letters(12).encode()).decode(),
)
_plant("npm", "//registry/:_authToken={}", "npm_" + _letters(36))
_plant("PyPI", "TWINE: {}", "pypi-AgEIcHlwaS5vcmc" + _letters(60))
_plant("Stripe", "stripe {}", "sk_live_" + _letters(24))
_plant("SendGrid", "mail {}", "SG." + _letters(22) + "." + _letters(43))
_plant("Twilio", "sid {}", "SK" + _letters(32, _HEX))
_plant("Telegram", "bot {} started", _letters(9, string.digits) + ":" + _letters(35))
_plant("Databricks", "host x token {}", "dapi" + _letters(32, _HEX))
_plant("Vault", "vault {}", "hvs." + _letters(40))
_plant("W&B", "wandb login {}", _letters(40, _HEX))
_plant("W&B variable", "WANDB_API_KEY={}", _letters(40, _HEX))
_plant("database", "postgresql://train:{}@db.internal:5432/x", _letters(16))
_plant("redis without a user", "redis://:{}@cache:6379/0", _letters(16))
_plant("password", "password: {}", "hunter2-" + _letters(6))
_plant("short password in YAML", "  db_password: '{}'", "s3cr3t")
_plant("argument", "python train.py --hub-token {} --epochs 3", _letters(30))
_plant("argument with =", "python train.py --api_key={} --epochs 3", _letters(30))
_plant("argument list", "['train.py', '--auth-token', '{}']", _letters(30))
_plant("netrc", "machine api.wandb.ai login user password {}", _letters(20))
_plant(
    "docker",
    '{"auths": {"r": {"auth": "{}"}}}',
    base64.b64encode(b"me:" + _letters(20).encode()).decode(),
)
_plant("cookie", "Set-Cookie: session={}; Path=/", _letters(30))
_plant("Metaflow service", "METAFLOW_SERVICE_AUTH_KEY={}", _letters(30))
_plant("JSON in JSON", '{"text": "{\\"client_secret\\": \\"{}\\"}"}', _letters(30))
_plant("age key", "# {}", "AGE-SECRET-KEY-1" + _letters(58, _UPPER))
_plant("Kubernetes", "client-key-data and token: {}", _letters(60))
_plant("kubeconfig", "    client-key-data: {}", "LS0tLS1CRUdJTi" + _letters(100))
_plant("variable of a pod", "- name: DB_PASSWORD\n  value: {}", _letters(16))
_plant("variable of a Batch job", '{"name": "DB_PASSWORD", "value": "{}"}', _letters(16))
_plant("second cookie", "Cookie: theme=dark; sessionid={}", _letters(32))
_plant("password with spaces", 'password: "my {} phrase"', "correct horse")
_plant("curl", "+ curl -u admin:{} https://h/x", _letters(14))
_plant("passphrase", "passphrase: {}", _letters(14))
_plant("docker login", "docker login -u me -p {} registry", _letters(16))
_plant("sshpass", "sshpass -p {} ssh h", _letters(12))
_plant("mysql", "mysql -u root -p{} db", _letters(12))
_plant("share", "net use z: \\\\s\\d /user:me {}", _letters(14))
_plant("key of a call", "wandb.login(key='{}')", _letters(40, _HEX))
_plant("address of a bot", "https://api.telegram.org/bot123456789:{}/send", _letters(35))
_plant("PuTTY", "Private-Lines: 1\n{}\nPrivate-MAC: aa", _letters(48))
_plant("Azure client secret", "value {} of app", _letters(3) + "8Q~" + _letters(34))
_plant("New Relic", "license {}", "NRAK-" + _letters(27, _UPPER))
_plant("GitLab runner", "runner {}", "GR1348941" + _letters(20))
_plant("Grafana", "grafana {}", "glsa_" + _letters(32) + "_1234abcd")
_plant("Atlassian", "jira {}", "ATATT3xFfGF0" + _letters(60))
_plant("Tailscale", "up {}", "tskey-auth-" + _letters(30))
_plant(
    "long password with spaces",
    f'client_secret: "{" ".join(_letters(9) for _ in range(80))} {{}}"',
    _letters(9),
)
_plant(
    "password with spaces in JSON in JSON",
    '{"text": "{\\"client_secret\\": \\"my {}\\"}"}',
    "correct horse",
)
_plant("password in the case of camels", "clientSecret: 'my {}'", "correct horse")
_plant("password in triple quotes", 'secret = """{}"""', "correct horse")
_plant("password with an @", "postgres://u:p@{}@h/db", "ss-" + _letters(6))


@pytest.mark.parametrize("kind", SECRETS)
def test_a_planted_secret_is_removed(kind: str) -> None:
    line, secret = SECRETS[kind]
    text, removed = redact(f"before\n{line}\nafter")
    assert secret not in text and removed >= 1
    assert text.startswith("before\n") and text.endswith("\nafter"), "and nothing beside it"
    assert redact(text) == (text, 0), "labels are no secrets"


_LONG = (
    "a",
    "token",
    "_",
    "-",
    "-a",
    "--token",
    "aA1+" * 16 + "\n",
    "1",
    "eyJhbGciOi-",
    "curl ",
    "a-",
    "mysql -",
    "name=token",
)
_LONG += (
    "-----BEGIN PRIVATE KEY-----",
    "sig ",
    'secret="',
    'secret = """ ',
    "://a:b",
    "password ",
    "token ",
    "docker login ",
)


@pytest.mark.parametrize("part", _LONG)
def test_the_time_is_linear_in_the_length_of_a_text(part: str) -> None:
    began = time.process_time()
    redact(part * (65536 // len(part)))
    assert time.process_time() - began < 1.0


_VALUES = [base64.b64encode(_letters(12).encode()).decode() for _ in range(2)] + [
    _letters(12) for _ in range(3)
]


def _manifest() -> dict[str, Any]:
    applied = json.dumps({"apiVersion": "v1", "kind": "Secret", "data": {"p": _VALUES[0]}})
    labels = {
        "name": "db",
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": applied},
    }
    texts = {"app.conf": f"a: {_VALUES[2]}\nb: {{{_VALUES[3]}}}\n", "x": _VALUES[4]}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": labels,
        "data": {"p": _VALUES[0], "user.name": _VALUES[1]},
        "stringData": texts,
    }


def _in_yaml(value: Any, ordered: bool) -> str:
    return yaml.safe_dump(value, sort_keys=ordered, width=10_000)


OTHER = {"kind": "ConfigMap", "data": {"path": "/mnt/kept"}}
MANIFESTS: dict[str, Callable[[bool], str]] = {
    "YAML": lambda ordered: _in_yaml(_manifest(), ordered),
    "documents": lambda ordered: (
        f"data: /kept\n---\n{_in_yaml(_manifest(), ordered)}---\n{_in_yaml(OTHER, ordered)}"
    ),
    "list": lambda ordered: _in_yaml(
        {"kind": "List", "items": [OTHER, _manifest(), OTHER]}, ordered
    ),
    "flow": lambda _: f"kind: Secret\ndata: {{p: {_VALUES[0]}, u: '{_VALUES[1]}'}}\n",
    "log": lambda ordered: (
        f"+ kubectl get secret\n{_in_yaml(_manifest(), ordered)}step 2\ndata: /mnt/kept\n"
    ),
    "log with prefixes": lambda ordered: "\n".join(
        f"2026-01-01T10:00:{at:02}Z node 0 | {line}"
        for at, line in enumerate(_in_yaml(_manifest(), ordered).split("\n"))
    ),
    "JSON": lambda ordered: json.dumps(_manifest(), sort_keys=ordered),
    "JSON in lines": lambda ordered: json.dumps(
        {"items": [_manifest()]}, sort_keys=ordered, indent=2
    ),
    "JSON in JSON": lambda ordered: json.dumps(
        {"data": {"kept": json.dumps(_manifest(), sort_keys=ordered)}}
    ),
    "JSON in lines in JSON": lambda ordered: json.dumps(
        {"kept": json.dumps(_manifest(), sort_keys=ordered, indent=1)}
    ),
    "YAML in JSON": lambda ordered: json.dumps({"data": {"kept": _in_yaml(_manifest(), ordered)}}),
    "cut JSON": lambda ordered: json.dumps(_manifest(), sort_keys=ordered)[: -3 if ordered else -8],
    "Windows": lambda ordered: _in_yaml(_manifest(), ordered).replace("\n", "\r\n"),
}


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("form", MANIFESTS)
def test_values_of_a_secret_manifest_are_removed(form: str, ordered: bool) -> None:
    text = MANIFESTS[form](ordered)
    redacted, removed = redact(text)
    assert not [value for value in _VALUES if value in redacted]
    assert (
        removed
        and redacted.count("\n") == text.count("\n")
        and redacted.count("kept") == text.count("kept")
    )


@pytest.mark.parametrize(
    "text",
    [
        '{"tokens_per_second": 5120.5, "token_count": 12, "seq": 3}',
        "tokens/s 5120, 4096 tokens, tokenizer: data/tokenizer.json, max_tokens=1024",
        "commit 3f2a9b5c1d8e7f604132 of step 500, sha256 " + "ab12" * 16,
        "s3://bucket/jobs/a/data/000001-b03e8051/000000000500/00000.bin",
        "tcp://10.0.0.1:29500 connected, 2026-11-23T07:00:00.123Z node 0 | loss: 2.31 grad: 0.5",
        "skipped sk-learn, desk-top and risk-free; author: ada, authored by her",
        "basic usage of the bearer",
        "mkdir -p /tmp/runs; docker run -u 1000:1000 -p 8080:80 image; ssh -p 22 host; wandb "
        "login ok",
        "unexpected token '<' at 3; key='loss/train'; name: step value: 12; sl.item() dp.step()",
        "kind: SecretStore\ndata:\n  path: /mnt/a\n",
        '{"kind": "ConfigMap", "data": {"a": "b"}, "spec": {"kind": "Secrets"}}',
        "a step of kind: Secret sharing\nloss: 2.1\ndata wait: 3",
        '"keys": ["q", "k", "v"], "key_bytes": 17, "monkey": "x", "passes": 2',
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert redact(text) == (text, 0)


@pytest.mark.parametrize("cut", ["none", "begin", "end"])
def test_the_bundle_removes_all_lines_of_a_private_key(cut: str) -> None:
    begin = "-----BEGIN OPENSSH PRIVATE KEY-----"
    end = "-----END OPENSSH PRIVATE KEY-----"
    parts = [part for part, name in ((begin, "begin"), (_PEM, ""), (end, "end")) if name != cut]
    text, removed = redact("step 1\n" + "\n".join(parts) + "\nstep 2")
    assert removed == 1 and text.count("\n") == len("\n".join(parts).split("\n")) + 1
    assert not any(line in text for line in _PEM.split("\n")) and text.endswith("step 2")
    escaped, _ = redact(json.dumps({"key": f"{begin}\n{_PEM}\n{end}"}))
    assert not any(line in escaped for line in _PEM.split("\n")) and json.loads(escaped)


def test_values_of_secret_variables_are_removed_wherever_they_are() -> None:
    own = secret_values(
        {"MY_DB_PASSWORD": "correct horse", "EBBFLOW_JOB": "a-job", "SSH_AUTH_SOCK": "/run/agent"}
    )
    assert own == ("correct horse",)
    assert redact("it said: correct horse", own) == ("it said: [redacted: environment]", 1)


def _run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ebbflow", "bundle", *words]
    return subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120
    )


def _make_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("EBBFLOW_RUNS", str(folder))
    store = Store.open(str(folder / "jobs" / "a"))
    store.put("config.json", json.dumps({"model": {"layers": 2}}).encode())
    store.put(generation_key(1, "abcd"), b"{}")
    store.put("data/000001-abcd/000000000001/00000.bin", b"weights")
    store.put("secrets/run-0", b"the secret of the agents")
    store.put("events/000001/0-0-000001-x.jsonl", b'{"kind": "x", "password": "pw-in-an-event"}\n')
    texts = [line for line, _ in SECRETS.values()] + [
        "-----BEGIN RSA PRIVATE KEY-----",
        *_PEM.split("\n"),
    ]
    texts += ["RuntimeError: CUDA error: out of memory"]
    lines = []
    at = 0
    for text in texts:
        place = {"job": "a", "generation": 1, "node": 0, "rank": 0, "step": 3, "phase": None}
        lines.append(
            LogLine(
                t="2026-11-23T07:00:00.000Z", text=text, start=at, end=at + len(text) + 1, **place
            )
        )
        at += len(text) + 1
    store.put(log_key(1, 0, 0, "000001-x"), "\n".join(line.to_json() for line in lines).encode())
    (folder / "a").symlink_to("jobs/a")
    store.put("job.json", KnownJob("a", str(folder)).note())
    dump = folder / "jobs" / "a" / "logs" / "000001-abcd" / "dump-1"
    dump.mkdir(parents=True)
    (dump / "rank-0.stacks").write_text('File "train.py", line 7 in step')
    return store


@pytest.mark.slow
def test_the_archive_holds_what_is_needed_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make_job(tmp_path / "runs", monkeypatch)
    output = tmp_path / "a.zip"
    done = _run("a", "--output", str(output), MY_TOKEN="value-of-this-machine")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(output) as archive:
        names = archive.namelist()
        whole = "\n".join(archive.read(name).decode() for name in names)
        assert "out of memory" in archive.read("diagnosis.txt").decode()
    for name in names:
        assert name in done.stdout, "the list is shown before"
    assert {
        "config.json",
        "machine/machine.json",
        "machine/packages.txt",
        "output/generation-000001-rank-0.txt",
    } < {*names}
    assert "logs/000001-abcd/dump-1/rank-0.stacks" in names
    assert not any(name.startswith(("data/", "secrets/")) for name in names)
    leaked = [kind for kind, (_, secret) in SECRETS.items() if secret in whole]
    assert not leaked
    for secret in (
        *_PEM.split("\n"),
        "pw-in-an-event",
        "value-of-this-machine",
        "the secret of the agents",
    ):
        assert secret not in whole
    assert "CUDA error: out of memory" in whole
    again = _run("a", "--output", str(output))
    assert again.returncode == 2 and "exists; fix:" in again.stderr
    listed = _run("a", "--list")
    assert listed.returncode == 0 and "config.json" in listed.stdout
    unknown = _run("b", "--output", str(tmp_path / "b.zip"))
    assert (
        unknown.returncode == 2
        and "no job 'b'" in unknown.stderr
        and not (tmp_path / "b.zip").exists()
    )


def test_an_archive_is_never_too_large_and_keeps_the_ends_of_its_files() -> None:
    noise = [BundleFile(f"events/{at}", os.urandom(200_000) + b"newest", 0) for at in range(8)]
    archive, packed = pack([BundleFile("config.json", b"{}", 0), *noise], 1_000_000)
    assert len(archive) <= 1_000_000 < LARGEST_BYTES
    assert packed[0].data == b"{}" and all(file.data.endswith(b"newest") for file in packed[1:])
    assert len(packed) >= 5 and any(file.cut for file in packed)
    with zipfile.ZipFile(io.BytesIO(archive)) as read:
        assert read.testzip() is None and read.namelist() == [file.name for file in packed]
