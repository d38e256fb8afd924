"""This machine's clock against AWS's: what is signed at another time than theirs is refused."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime

from ebbflow.infra.aws.calls import aws_client
from ebbflow.infra.checks.batch.queues import why_not_asked
from ebbflow.infra.errors import CloudError, StoreError
from ebbflow.infra.preflight import Finding, PreflightContext
from ebbflow.infra.store.s3 import aws_settings

_DATE_SECONDS = 5.0
_SKEW_WARNING_SECONDS = 60.0
_STORE_REFUSES_SECONDS = 900.0  # S3 answers RequestTimeTooSkewed beyond it
# "A request must reach AWS within five minutes of the time stamp in the request":
# https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv.html
_AWS_REFUSES_SECONDS = 300.0
_FIX = "set the clock: chronyc makestep, or timedatectl set-ntp true"


def check_store_clock(context: PreflightContext) -> Finding:
    """This machine's clock against the store's: S3 refuses requests that are signed 15 minutes off."""
    if not context.config.store.startswith("s3://"):
        return Finding.skipped("the store is a folder: nothing is signed")
    try:
        settings = aws_settings()
    except StoreError as error:
        return Finding.skipped(f"the store cannot be found: {error}")
    url = settings.endpoint or f"https://s3.{settings.region}.amazonaws.com"
    return _compared(url, warned=_SKEW_WARNING_SECONDS, refused=_STORE_REFUSES_SECONDS)


def check_batch_clock(context: PreflightContext) -> Finding:
    """This machine's clock against Batch's: AWS refuses requests that are signed 5 minutes off."""
    if reason := why_not_asked(context):
        return Finding.skipped(reason)
    try:
        url = aws_client("batch", context.config.batch.region).meta.endpoint_url
    except (CloudError, StoreError) as error:
        return Finding.skipped(str(error))
    return _compared(url, warned=_AWS_REFUSES_SECONDS, refused=_AWS_REFUSES_SECONDS)


def _compared(url: str, *, warned: float, refused: float) -> Finding:
    """warned, refused: seconds apart from which it is told, and from which nothing that is signed is taken."""
    before = time.time()
    try:
        date = _date_of(url)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return Finding.skipped(f"{url} tells no time: {error}")
    after = time.time()
    # The header is cut to whole seconds, and was written at some moment between the two readings of our clock.
    skew = max(before - date - 1.0, date - after, 0.0)
    direction = "ahead of" if before > date else "behind"
    if skew <= warned:
        return Finding.passed(f"this machine's clock is within {max(skew, 1.0):.0f} s of {url}'s")
    consequence = "; signed requests are refused" if skew > refused else ""
    return Finding.failed(
        f"this machine's clock is {skew:,.0f} s {direction} {url}'s ({refused:.0f} s allowed){consequence}", _FIX
    )


def _date_of(url: str) -> float:
    """Unix time in the Date header of whatever `url` answers, even a refusal.

    Raises OSError, ValueError, HTTPException.
    """
    opener = urllib.request.build_opener(_NoRedirect)
    request = urllib.request.Request(url, method="HEAD")
    try:
        with opener.open(request, timeout=_DATE_SECONDS) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as refusal:
        headers = refusal.headers
    if not headers.get("Date"):
        raise ValueError("no Date header")
    return parsedate_to_datetime(headers["Date"]).timestamp()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Another server's clock is not the one to compare with."""

    def redirect_request(self, *_: object) -> None:
        return None
