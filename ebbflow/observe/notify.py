"""Delivery of one-line notifications by webhook, by e-mail or to a command."""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import re
import smtplib
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import EmailMessage

from ebbflow.core.config.schema import NotificationsConfig
from ebbflow.core.errors import InfraError, Outcome

_SECONDS = 10.0
_SMTPS_PORT = 465
# Addresses that a mail or chat program makes a link of; s3:// and file:// are places of a report.
_LINK = re.compile(r"(?i)\b(?!s3:|file:)([a-z][a-z0-9+-]*):(?=//)|\b(www)(?=\.\w)")
_MENTION = re.compile(r"(?<![\w.])@(?=\w)")
_SLACK = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


class NotificationError(InfraError):
    """Error: a notification cannot be sent. The message contains no secret."""

    outcome = Outcome.CONFIG


def open_channels(config: NotificationsConfig) -> dict[str, Callable[[str], None]]:
    """Return the configured channels by name, each as a function that delivers one line.

    The function raises an exception if it fails.
    """
    channels: dict[str, Callable[[str], None]] = {}
    if config.webhook_env is not None:
        channels["webhook"] = lambda line: _post(config, line)
    if config.smtp_server is not None:
        channels["e-mail"] = lambda line: _mail(config, line)
    if config.command:
        channels["command"] = lambda line: _run(config, line)
    return channels


def without_links(text: str) -> str:
    """Respell web addresses in a text so that no program turns them into links.

    A message quotes exceptions, which may quote anything that a job has read.
    """
    return _LINK.sub(lambda match: f"{match[0].rstrip(':')}[:]", text).replace("](", "] (")


def without_markup(text: str) -> str:
    """Escape a text so that Slack, Mattermost and Discord show it unchanged.

    It then has no links, no mentions such as <!channel> or @here, and no entities.
    """
    return _MENTION.sub("@\u200b", without_links(text)).translate(_SLACK)


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise NotificationError(f"the environment variable {name} is not set")
    return value


def _post(config: NotificationsConfig, line: str) -> None:
    name = config.webhook_env or ""
    url = _variable(name)
    if not url.startswith(("https://", "http://")):
        raise NotificationError(f"the value of {name} is no URL")
    body = json.dumps({"text": without_markup(line)}).encode()
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS):
            return
    except urllib.error.HTTPError as error:
        raise NotificationError(
            f"the server of {name} answered {error.code}"
        ) from None  # the cause has the URL
    except http.client.InvalidURL:
        raise NotificationError(f"the value of {name} is no URL") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise NotificationError(f"the server of {name} does not answer: {reason}") from None


def _mail(config: NotificationsConfig, line: str) -> None:
    host, _, port = (config.smtp_server or "").partition(":")
    number = int(port or 25)
    text = without_links(line)
    message = EmailMessage()
    message["Subject"] = text[:150]
    message["From"] = config.mail_from
    message["To"] = ", ".join(config.mail_to)
    message.set_content(f"{text}\n")
    try:
        with _connect(host, number) as server:
            secure = number == _SMTPS_PORT
            stays_here = _peer_is_here(server)
            server.ehlo_or_helo_if_needed()
            if not secure and not stays_here and server.has_extn("starttls"):
                server.starttls(context=ssl.create_default_context())
                secure = True
            if config.smtp_user is not None:
                if not secure and not stays_here:
                    raise NotificationError(
                        f"{host}:{number} offers no TLS, so the password of {config.smtp_user} "
                        f"was not sent; fix: a server with STARTTLS or port {_SMTPS_PORT}, or no "
                        "smtp_user"
                    )
                server.login(config.smtp_user, _variable(config.smtp_password_env or ""))
            server.send_message(message)
    except ssl.SSLCertVerificationError as error:
        raise NotificationError(
            f"the certificate of {host}:{number} is not trusted: {error.verify_message}; fix: "
            "the host name that it was made for, or the environment variable SSL_CERT_FILE with "
            "the file of its authority"
        ) from error


def _connect(host: str, port: int) -> smtplib.SMTP:
    if port == _SMTPS_PORT:
        return smtplib.SMTP_SSL(host, port, timeout=_SECONDS, context=ssl.create_default_context())
    return smtplib.SMTP(host, port, timeout=_SECONDS)


def _peer_is_here(server: smtplib.SMTP) -> bool:
    """Return whether the mail server is on this machine, so that messages need no TLS."""
    assert server.sock is not None
    address = ipaddress.ip_address(server.sock.getpeername()[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _run(config: NotificationsConfig, line: str) -> None:
    try:
        subprocess.run(
            [*config.command, line],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        raise NotificationError(f"{config.command[0]} exited with {error.returncode}") from error
    except subprocess.TimeoutExpired as error:
        raise NotificationError(f"{config.command[0]} did not end within {_SECONDS:g} s") from error
