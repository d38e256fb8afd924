"""Notifications of a job: one line of text by webhook, by e-mail or to a command."""

from __future__ import annotations

import json
import os
import smtplib
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import EmailMessage

from ebbflow.infra.config.schema import NotificationsConfig
from ebbflow.infra.errors import InfraError, Outcome

_SECONDS = 10.0
_SMTPS_PORT = 465


class NotificationError(InfraError):
    """Error: a notification cannot be sent. The message contains no secret."""

    outcome = Outcome.CONFIG


def open_channels(config: NotificationsConfig) -> dict[str, Callable[[str], None]]:
    """Return the configured channels by name. Each is a function that delivers one line, or raises an exception."""
    channels: dict[str, Callable[[str], None]] = {}
    if config.webhook_env is not None:
        channels["webhook"] = lambda line: _post(config, line)
    if config.smtp_server is not None:
        channels["e-mail"] = lambda line: _mail(config, line)
    if config.command:
        channels["command"] = lambda line: _run(config, line)
    return channels


def _variable(name: str) -> str:
    if not (value := os.environ.get(name)):
        raise NotificationError(f"the environment variable {name} is not set")
    return value


def _post(config: NotificationsConfig, line: str) -> None:
    name = config.webhook_env or ""
    url = _variable(name)
    if not url.startswith(("https://", "http://")):
        raise NotificationError(f"the value of {name} is no URL")
    body = json.dumps({"text": line}).encode()
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS):
            return
    except urllib.error.HTTPError as error:
        raise NotificationError(f"the server of {name} answered {error.code}") from None  # the cause has the URL
    except urllib.error.URLError as error:
        raise NotificationError(f"the server of {name} does not answer: {error.reason}") from None


def _mail(config: NotificationsConfig, line: str) -> None:
    host, _, port = (config.smtp_server or "").partition(":")
    number = int(port or 25)
    message = EmailMessage()
    message["Subject"], message["From"], message["To"] = line[:150], config.mail_from, ", ".join(config.mail_to)
    message.set_content(f"{line}\n")
    with (smtplib.SMTP_SSL if number == _SMTPS_PORT else smtplib.SMTP)(host, number, timeout=_SECONDS) as server:
        if number != _SMTPS_PORT and server.ehlo()[0] == 250 and server.has_extn("starttls"):
            server.starttls()
        if config.smtp_user is not None:
            server.login(config.smtp_user, _variable(config.smtp_password_env or ""))
        server.send_message(message)


def _run(config: NotificationsConfig, line: str) -> None:
    try:
        subprocess.run(
            [*config.command, line], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            timeout=_SECONDS, check=True,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        raise NotificationError(f"{config.command[0]} exited with {error.returncode}") from error
    except subprocess.TimeoutExpired as error:
        raise NotificationError(f"{config.command[0]} did not end within {_SECONDS:g} s") from error
