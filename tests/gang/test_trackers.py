"""Trackers and notifications: one run over all attempts, no step twice, each library's files read
back.
"""

from __future__ import annotations

import base64
import http.server
import importlib.util
import ipaddress
import json
import os
import re
import socket
import socketserver
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ebbflow.core.config.load import load_config
from ebbflow.core.config.problems import ConfigError
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import (
    BUDGET,
    COMMIT,
    CONFIGURED,
    EVALUATION,
    GENERATION_ENDED,
    GENERATION_STARTED,
    NODE_STARTED,
    NOTICE,
    OUTCOME,
    PLAN,
    PREPARED,
    RESTORE,
    STEP,
    Origin,
    read_events,
)
from ebbflow.core.observer_process import start_observer
from ebbflow.core.process import process_stat
from ebbflow.core.store import Store
from ebbflow.cost.report.report import build_report
from ebbflow.observe import feeds, notify
from ebbflow.observe.feeds import JobFeeds
from ebbflow.observe.notify import NotificationError, open_channels
from ebbflow.observe.observer import JobObserver, Output, PageFile
from ebbflow.observe.watch import LiveReport
from tests.support.tracker_files import (
    Series,
    mlflow_run,
    read_jsonl,
    read_mlflow,
    read_tensorboard,
    serving,
    sync_wandb,
)

# Attempts that are killed: (restored step, last step). Each makes a commit every 10 steps.
ATTEMPTS = [(0, 17), (10, 25), (20, 38), (30, 44), (40, 50)]
RUNNING = {
    "since_utc": 0.0,
    "host": "here",
    "user": "me",
    "pid": 1,
    "command": "run",
    "heartbeat_age_seconds": 0.0,
}

PACKAGES = {
    "jsonl": (),
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "wandb": ("wandb",),
}


class MailServer(socketserver.ThreadingTCPServer):
    """A mail server. With `certificate`, it offers STARTTLS."""

    certificate: ssl.SSLContext | None = None

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), Mailbox)
        self.mails: list[str] = []
        self.logins: list[
            tuple[bool, bytes]
        ] = []  # whether the connection was encrypted, and what was sent


class Mailbox(socketserver.StreamRequestHandler):
    """The part of SMTP that a client needs."""

    server: MailServer

    def handle(self) -> None:
        self.wfile.write(b"220 here\r\n")
        secure = False
        while line := self.rfile.readline():
            word = line[:4].upper().strip()
            content = []
            if word == b"EHLO":
                if secure or self.server.certificate is None:
                    offered = b""
                else:
                    offered = b"250-STARTTLS\r\n"
                self.wfile.write(b"250-here\r\n" + offered + b"250 AUTH PLAIN\r\n")
                continue
            if word == b"STAR" and self.server.certificate is not None:
                self.wfile.write(b"220 go on\r\n")
                try:
                    encrypted = self.server.certificate.wrap_socket(
                        self.connection, server_side=True
                    )
                except OSError:  # the client has refused the certificate
                    return
                self.rfile = encrypted.makefile("rb")
                self.wfile = encrypted.makefile("wb", buffering=0)
                secure = True
                continue
            if word == b"AUTH":
                self.server.logins.append((secure, line.split()[-1]))
                self.wfile.write(b"235 welcome\r\n")
                continue
            if word == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                while (line := self.rfile.readline()) != b".\r\n":
                    content.append(line.decode())
                self.server.mails.append("".join(content))
            self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 fine\r\n")
            if word == b"QUIT":
                return


def write_attempt(store: Store, number: int, *, done: bool = False) -> None:
    first, last = ATTEMPTS[number - 1]
    settings = [{"key": "training.max_steps", "value": 50, "source": "default"}]
    settings += [
        {"key": "workload_options.api_key", "value": "sk-verysecret123", "source": "default"}
    ]
    with EventLog(
        store, Origin(job="demo", run="demo", generation=number, process="prepare")
    ) as log:
        log.emit(CONFIGURED, settings=settings)
        log.emit(PREPARED, weight_unit="samples")
    agent = EventLog(store, Origin(job="demo", run="demo", generation=number, process="agent"))
    agent.emit(GENERATION_STARTED, nodes=1, processes_per_node=1, parent_step=first)
    agent.emit(NODE_STARTED, ranks=[0], host="here")
    with EventLog(store, Origin(job="demo", run="demo", generation=number, rank=0)) as log:
        if first:
            log.emit(RESTORE, step=first, key="k")
        for step in range(first + 1, last + 1):
            log.emit(
                STEP, step=step, loss=loss_of(step, number), seconds={"useful_step": 1e-6}, tokens=8
            )
            if step % 10 == 0:
                log.emit(EVALUATION, step=step, metrics={"held_out_loss": float(step)})
                log.emit(COMMIT, step=step, key="k", bytes=8, seconds=0.1)
        if done:
            log.emit(OUTCOME, outcome="completed", step=last)
    if done:
        reason = "completed"
    else:
        reason = "rank_killed"
    agent.emit(GENERATION_ENDED, reason=reason, culprit="" if done else "rank 0: killed by SIGKILL")
    agent.close()


def write_plan(store: Store, *, budget_usd: float) -> None:
    chosen = {
        "instance_type": "g5.xlarge",
        "nodes": 1,
        "market": "spot",
        "usd_per_hour": 3.6,
        "expected_usd": 0.9,
    }
    chosen |= {
        "on_demand_usd_per_hour": 7.2,
        "price_kind": "recorded 2026-07-20",
        "expected_hours": 0.5,
    }
    with EventLog(store, Origin(job="demo", run="demo", process=f"plan{budget_usd}")) as log:
        log.emit(PLAN, simulated=False, refusal=None, chosen=chosen, budget_usd=budget_usd)


def loss_of(step: int, attempt: int) -> float:
    return step + attempt / 16  # exact in float32, and another value in each attempt


def kept_loss(step: int) -> float:
    return loss_of(
        step, next(number for number in range(5, 0, -1) if ATTEMPTS[number - 1][0] < step)
    )


def follow(
    store: Store, config: RunConfig, said: list[str] | None = None, *, seconds: float = 20.0
) -> bool:
    observer = observer_of(store, config, said.append if said is not None else print)
    observer.look()
    observer.look(last=True)
    return observer.finish(seconds)


def observer_of(
    store: Store, config: RunConfig, tell: Callable[[str], None], *more: Output
) -> JobObserver:
    """The observer of the job in the store, with the feeds of the configuration and more outputs."""
    live = LiveReport("demo", store.uri.removesuffix("/jobs/demo"), launcher=RUNNING)
    return JobObserver(live, [*more, JobFeeds(store, "demo", config, tell)])


def config_with(**values: object) -> RunConfig:
    return RunConfig.model_validate(values)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EBBFLOW_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    return tmp_path / "runs"


def series_of(kind: str, folder: Path) -> Callable[[str], Series]:
    """Return the function that reads a metric of the job back from a tracker."""
    job = folder / "demo"
    if kind == "wandb":
        return sync_wandb(job / "wandb").series
    if kind == "mlflow":
        _, run = mlflow_run(folder.parent / "mlflow.db")
        assert run.info.run_name == "demo" and run.info.status == "FINISHED"
        assert run.data.params["training.max_steps"] == "50"
        assert run.data.tags["ebbflow.report"].endswith("report.html")
        return lambda name: read_mlflow(folder.parent / "mlflow.db", name)
    return lambda name: (read_jsonl if kind == "jsonl" else read_tensorboard)(job, name)


@pytest.mark.parametrize("kind", PACKAGES)
def test_five_attempts_are_one_run_with_each_step_once(
    tmp_path: Path, runs: Path, kind: str
) -> None:
    for package in PACKAGES[kind]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (requirements-dev.txt)")
    if kind == "mlflow":
        url = f"sqlite:///{tmp_path}/mlflow.db"
    else:
        url = None
    store = Store.open(str(tmp_path / "jobs" / "demo"))
    said = list[str]()
    for number in range(1, 6):
        write_attempt(store, number, done=number == 5)
        if kind == "wandb":  # it names its folders by the second
            time.sleep(1 - time.time() % 1)
        assert follow(
            store, config_with(trackers=[{"type": kind, "url": url}]), said, seconds=60.0
        ), said
    assert not [line for line in said if "sent later" in line], said
    if kind == "wandb":
        assert said == [f"wandb: offline; send it with: wandb sync {runs}/demo/wandb"] * 5
    read = series_of(kind, runs)
    losses = read("loss")
    assert [step for step, _ in losses] == list(range(1, 51))
    assert [loss for _, loss in losses] == [kept_loss(step) for step in range(1, 51)]
    curve = build_report(read_events(store)).loss_curve
    assert losses == curve
    assert read("held_out_loss") == [(step, float(step)) for step in range(10, 51, 10)]
    redone = read("ebbflow/redone_steps")
    assert (
        redone[-1][0] == 50 and redone[-1][1] == build_report(read_events(store)).redone_steps > 0
    )
    files = [
        path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file() and "jobs" not in path.parts
    ]
    assert not any(b"sk-verysecret123" in content for content in files)


def test_live_steps_keep_their_first_value_and_the_redone_are_counted(
    tmp_path: Path, runs: Path
) -> None:
    store = Store.open(str(tmp_path / "jobs" / "demo"))
    for number in range(1, 6):
        write_attempt(store, number, done=number == 5)
        assert follow(store, config_with(trackers=[{"type": "jsonl", "live": True}]))
    losses = read_jsonl(runs / "demo", "loss")
    assert [step for step, _ in losses] == list(range(1, 51))
    first = []
    for step in range(1, 51):
        first.append(next(number for number in range(1, 6) if ATTEMPTS[number - 1][1] >= step))
    assert [loss for _, loss in losses] == [
        loss_of(step, number) for step, number in enumerate(first, start=1)
    ]
    counts = [value for _, value in read_jsonl(runs / "demo", "ebbflow/redone_steps")]
    assert counts == sorted(counts) and counts[-1] > 0


def test_lines_of_a_killed_writer_are_mended_and_a_new_file_gets_all_steps(
    tmp_path: Path, runs: Path
) -> None:
    store = Store.open(str(tmp_path / "jobs" / "demo"))
    config = config_with(trackers=[{"type": "jsonl"}])
    write_attempt(store, 1)
    assert follow(store, config)
    path = runs / "demo" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])  # the last line is cut
    write_attempt(store, 2)
    assert follow(store, config)
    assert [step for step, _ in read_jsonl(runs / "demo", "loss")] == list(range(1, 21))
    path.unlink()
    assert follow(store, config)
    assert [step for step, _ in read_jsonl(runs / "demo", "loss")] == list(range(1, 21))


def test_a_tracker_that_is_down_warns_once_and_gets_everything_later(
    tmp_path: Path, runs: Path
) -> None:
    store = Store.open(str(tmp_path / "jobs" / "demo"))
    said = list[str]()
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder must be")
    config = config_with(trackers=[{"type": "jsonl", "folder": str(blocked)}, {"type": "jsonl"}])
    write_attempt(store, 1)
    assert not follow(store, config, said, seconds=2.5)
    warnings = [line for line in said if "training goes on, and this is sent later" in line]
    assert len(warnings) == 1 and str(blocked) in warnings[0]
    assert said[-1] == "not everything is sent to jsonl; fix: ebbflow track demo"
    assert [step for step, _ in read_jsonl(runs / "demo", "loss")] == list(range(1, 11)), (
        "the other tracker is not affected"
    )
    blocked.unlink()
    assert follow(store, config, said)
    lines = (blocked / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 11))


def test_a_missing_package_is_one_line_with_the_fix(
    tmp_path: Path, runs: Path, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    store = Store.open(str(tmp_path / "jobs" / "demo"))
    said = list[str]()
    write_attempt(store, 1)
    follow(store, config_with(trackers=[{"type": "wandb"}]), said, seconds=0.5)
    assert said[0].startswith(
        "wandb: wandb is not installed; fix: pip install wandb; training goes on"
    )


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_each_channel_gets_each_message_once_although_the_webhook_fails_at_first(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted = []
    answers = [503, 500]

    class Webhook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if answers:
                code = answers.pop(0)
            else:
                code = 200
            if code == 200:
                posted.append(json.loads(body)["text"])
            self.send_response(code)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    webhook = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Webhook)
    mail = MailServer()
    monkeypatch.setenv(
        "HOOK_URL", f"http://127.0.0.1:{webhook.server_port}/services/T00/hooksecret"
    )
    script = tmp_path / "tell.sh"
    script.write_text(f'#!/bin/sh\necho "$2" >> {tmp_path}/told\n')
    script.chmod(0o755)
    server = f"127.0.0.1:{mail.server_address[1]}"
    config = config_with(
        notifications={
            "webhook_env": "HOOK_URL",
            "command": [str(script), "--text"],
            "smtp_server": server,
            "mail_from": "jobs@example.com",
            "mail_to": ["me@example.com"],
        },
    )
    store = Store.open(str(tmp_path / "jobs" / "demo"))
    said = list[str]()
    write_plan(store, budget_usd=1000.0)
    with serving(webhook), serving(mail):
        for number in (1, 2):
            write_attempt(store, number)
            with EventLog(
                store, Origin(job="demo", run="demo", generation=number, process=f"notice{number}")
            ) as log:
                log.emit(
                    NOTICE, source="imds", action="terminate", does="leave", seconds_left=118.0
                )
            assert follow(store, config, said), said
        budget = round(float(build_report(read_events(store)).total_usd) / 0.85, 9)
        assert budget > 0
        write_plan(store, budget_usd=budget)
        with EventLog(store, Origin(job="demo", run="demo", generation=2, process="stop")) as log:
            log.emit(
                BUDGET,
                threshold=1.0,
                budget_usd=budget,
                spent_usd=0.85 * budget,
                reserve_usd=0.15 * budget,
            )
        silent = config.notifications.model_copy(update={"silence_minutes": 0.001})
        observer = observer_of(
            store, config.model_copy(update={"notifications": silent}), said.append
        )
        # The second look hears nothing for 0.2 s, and the third must not say it again
        for pause in (0.2, 0.2, 0.0):
            observer.look(last=not pause)
            time.sleep(pause)
        assert observer.finish(20)
    expected = [
        "50% of the budget",
        "80% of the budget",
        "the job stops within its budget",
        "no sign of the ranks",
        "Interrupted after",
        "starts",
        "notice (imds, terminate) to node 0, 118 s left; response: leave",
        "interruption: generation 1: rank killed (rank 0: killed by SIGKILL)",
        "Interrupted after",
        "starts again after the commit of step 10",
        "notice (imds",
        "interruption: generation 2",
        "Interrupted after",
    ]
    told = (tmp_path / "told").read_text().splitlines()
    assert sorted(told) == sorted(posted) and len(told) == len(mail.mails) == len(expected)
    for words in expected:
        assert any(line.startswith(f"ebbflow demo: {words}") for line in told), told
    assert told[0].startswith("ebbflow demo: starts on 1 × g5.xlarge spot")
    assert f"report: {store.uri}/report.html" in told[-1]
    assert sum("webhook" in line and "sent later" in line for line in said) == 1
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"hooksecret" not in everything and "hooksecret" not in "".join(said)


def test_a_webhook_that_hangs_is_tried_again_and_delays_nothing_else(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "_SECONDS", 0.5)
    store = Store.open(str(tmp_path / "jobs" / "demo"))
    said = list[str]()
    script = tmp_path / "tell.sh"
    script.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/told\n')
    script.chmod(0o755)
    config = config_with(
        trackers=[{"type": "jsonl"}],
        notifications={"webhook_env": "HOOK", "command": [str(script)]},
    )
    write_attempt(store, 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        monkeypatch.setenv("HOOK", f"http://127.0.0.1:{silent.getsockname()[1]}/hooksecret")
        page = tmp_path / "live.html"
        observer = observer_of(store, config, said.append, PageFile("demo", page))
        observer.look(last=True)
        wait_for(lambda: page.is_file() and 'data-state="ended"' in page.read_text())
        silent.settimeout(60.0)
        requests = [silent.accept() for _ in range(2)]
        began = time.monotonic()
        assert not observer.finish(0.2) and time.monotonic() - began < 3.0
    del requests
    assert (
        "webhook: the server of HOOK does not answer: timed out; training goes on, and this is "
        "sent later" in said
    )
    assert said[-1] == "not everything is sent to webhook; fix: ebbflow track demo"
    assert (
        len((tmp_path / "told").read_text().splitlines()) == 3
        and len(read_jsonl(runs / "demo", "loss")) == 10
    )


def test_the_live_page_goes_on_without_trackers_that_end_their_process(
    tmp_path: Path, runs: Path
) -> None:
    store = Store.open(str(tmp_path / "store" / "jobs" / "demo"))
    config = {"store": str(tmp_path / "store"), "trackers": [{"type": "jsonl"}]}
    page = tmp_path / "live.html"
    said = list[str]()
    write_attempt(store, 1)
    process = start_observer("demo", config["store"], config, page=page, tell=said.append)
    assert process is not None
    wait_for(lambda: page.is_file() and "step 10" in page.read_text())
    assert process._process is not None
    process._process.kill()
    wait_for(lambda: any("was killed by SIGKILL" in line for line in said))
    page.unlink()
    wait_for(page.is_file)
    process.end()
    page.unlink()
    time.sleep(0.2)
    assert not page.exists() and process._process.poll() is not None


def test_no_part_of_a_webhook_is_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (
        "http://127.0.0.1:1/T0/hook secret",
        "http://127.0.0.1:secret/T0",
        "http://127.0.0.1:1/T0/secret",
    ):
        monkeypatch.setenv("HOOK", value)
        with pytest.raises(NotificationError, match="HOOK") as caught:
            open_channels(config_with(notifications={"webhook_env": "HOOK"}).notifications)[
                "webhook"
            ]("text")
        assert "secret" not in str(caught.value)


def write_certificate(path: Path, address: str) -> None:
    """A key and a certificate of its own for an IP address."""
    cryptography = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    name = cryptography.Name([cryptography.NameAttribute(cryptography.NameOID.COMMON_NAME, "mail")])
    known = cryptography.SubjectAlternativeName(
        [cryptography.IPAddress(ipaddress.ip_address(address))]
    )
    made = (
        cryptography.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(known, critical=False)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    path.write_bytes(
        key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain)
        + made.public_bytes(encoding)
    )


def own_address() -> str:
    """An address of this machine that is not its loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            pytest.skip("this machine has no address but its loopback")
        return str(probe.getsockname()[0])


def test_a_password_is_sent_only_through_tls_with_a_trusted_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = own_address()
    monkeypatch.setenv("MAIL_PASSWORD", "mailsecret")
    write_certificate(tmp_path / "mail.pem", address)
    plain = MailServer(address)
    encrypted = MailServer(address)
    here = MailServer()
    for server in (encrypted, here):  # what its loopback offers is not used
        server.certificate = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.certificate.load_cert_chain(tmp_path / "mail.pem")

    def send(server: MailServer, **login: str) -> None:
        own = {
            "smtp_server": ":".join(map(str, server.server_address)),
            "mail_from": "a@b.c",
            "mail_to": ["d@e.f"],
        }
        open_channels(config_with(notifications={**own, **login}).notifications)["e-mail"](
            "the tide is in"
        )

    login = {"smtp_user": "jobs", "smtp_password_env": "MAIL_PASSWORD"}
    with serving(plain), serving(encrypted), serving(here):
        with pytest.raises(
            NotificationError, match=r"offers no TLS, so the password of jobs was not sent; fix: "
        ):
            send(plain, **login)
        with pytest.raises(
            NotificationError,
            match=r"is not trusted: self-signed certificate; fix: .*SSL_CERT_FILE",
        ):
            send(encrypted, **login)
        assert not plain.mails and not encrypted.mails and not plain.logins and not encrypted.logins
        send(plain)
        send(here, **login)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "mail.pem"))
        send(encrypted, **login)
    word = base64.b64encode(b"\0jobs\0mailsecret")
    assert [len(server.mails) for server in (plain, encrypted, here)] == [1, 1, 1]
    assert (plain.logins, encrypted.logins, here.logins) == ([], [(True, word)], [(False, word)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "trackers: [{type: wandb, key_env: abc-secret}]",
            "key_env must be the name of an environment variable",
        ),
        ("trackers: [{type: mlflow, url: 'http://me:secret@host/'}]", "a url with a password"),
        ("trackers: [{type: jsonl, url: 'http://host/'}]", "jsonl has no url"),
        ("trackers: [{kind: jsonl}]", "kind"),
        (
            "notifications: {webhook_env: 'https://hooks.slack.com/x'}",
            "webhook_env must be the name",
        ),
        ("notifications: {smtp_server: 'mail:587'}", "needs mail_from and mail_to"),
    ],
)
def test_wrong_settings_are_refused_with_the_fix(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "my.yaml").write_text(text + "\n")
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "my.yaml", project_root=tmp_path)


def test_old_news_are_not_sent(tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(str(tmp_path / "jobs" / "demo"))
    write_attempt(store, 1)
    monkeypatch.setattr(feeds, "_OLD_SECONDS", -1.0)
    assert follow(store, config_with(notifications={"command": ["/bin/false"]}))


def test_the_snippets_of_the_guide_are_valid_and_name_what_there_is(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "trackers.md").read_text()
    snippets = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert len(snippets) == 2
    for number, text in enumerate(snippets):
        (tmp_path / f"{number}.yaml").write_text(text)
    trackers = load_config(tmp_path / "0.yaml", project_root=tmp_path).config.trackers
    assert {tracker.type for tracker in trackers} == set(PACKAGES)
    own = load_config(tmp_path / "1.yaml", project_root=tmp_path).config.notifications
    assert all(getattr(own, name) for name in type(own).model_fields)
    assert set(open_channels(own)) == {"webhook", "command", "e-mail"}


def test_a_job_that_has_ended_is_sent_by_hand_to_the_trackers_of_another_file(
    tmp_path: Path, runs: Path
) -> None:
    store = Store.open(str(tmp_path / "store" / "jobs" / "demo"))
    write_attempt(store, 1, done=True)
    store.put(
        "config.json",
        json.dumps({"config": RunConfig(store=str(tmp_path / "store")).model_dump()}).encode(),
    )
    (tmp_path / "other.yaml").write_text(f"trackers: [{{type: jsonl, folder: {tmp_path}/sent}}]\n")
    words = [sys.executable, "-m", "ebbflow", "track", "demo", "--store", str(tmp_path / "store")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    refused = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and "has no trackers; fix: --config" in refused.stderr, refused
    done = subprocess.run(
        [*words, "--config", str(tmp_path / "other.yaml")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, f"jsonl: {tmp_path}/sent/metrics.jsonl\n"), done
    lines = (tmp_path / "sent" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 11))


def test_the_tracker_sends_what_a_killed_launcher_left_and_ends(tmp_path: Path, runs: Path) -> None:
    store = Store.open(str(tmp_path / "store" / "jobs" / "demo"))
    write_attempt(store, 1)
    config = {"store": str(tmp_path / "store"), "trackers": [{"type": "jsonl"}]}
    code = (
        "import os, signal, time; from ebbflow.core.observer_process import "
        f"start_observer\nown = start_observer('demo', {config['store']!r}, {config!r})\nwhile "
        "own._process is None or not own._process.stdin.closed: time.sleep(0.01)\n"
        "print(own._process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, "-c", code]
    launcher = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert launcher.returncode == -9, launcher
    pid = int(launcher.stdout.split()[0])
    wait_for(lambda: (stat := process_stat(pid)) is None or not stat.living)
    assert [step for step, _ in read_jsonl(runs / "demo", "loss")] == list(range(1, 11))
    assert json.loads((runs / "demo" / "run.json").read_text())["ebbflow/outcome"] == "interrupted"
