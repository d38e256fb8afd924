"""Preflight checks of the store, and of whether this machine's clock agrees with the store's."""

import http.client
import os
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from http.client import HTTPMessage
from pathlib import Path
from typing import IO

from ebbflow.core.errors import ObjectNotFound, StoreError, StoreForbidden
from ebbflow.core.layout import METAFLOW_FOLDER, job_prefix, records_root, runs_folder
from ebbflow.core.preflight import CheckFinding, PreflightContext, failed, passed, skipped
from ebbflow.core.store import Store
from ebbflow.core.store.errors import ACTIONS
from ebbflow.core.store.s3 import aws_settings, split_uri

_PROBE_BYTES = 4096
_REQUEST_SECONDS = 10.0
_MISSING_RIGHT = ("AccessDenied", "403")

_DATE_SECONDS = 5.0
_SKEW_WARNING_SECONDS = 60.0
_STORE_REFUSES_SECONDS = 900.0  # S3 answers RequestTimeTooSkewed beyond it
_FIX = "set the clock: chronyc makestep, or timedatectl set-ntp true"


def store_folder(context: PreflightContext) -> Path | None:
    """Return the folder of a local store, or None for a remote store."""
    store = context.config.store
    if "://" in store and not store.startswith("file://"):
        return None
    return context.project_root / Path(store.removeprefix("file://")).expanduser()


def nearest_existing(folder: Path) -> Path:
    """Return the folder if it exists, else its nearest parent that exists."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder


def check_store_folder(context: PreflightContext) -> CheckFinding:
    """Check, without writing, that the folder of a local store exists or can be created, and is
    writable.
    """
    folder = store_folder(context)
    if folder is None:
        return skipped("the store is remote; the check store-probe asks it")
    there = nearest_existing(folder)
    if not there.is_dir():
        return failed(
            f"{there} is in the way: it is not a folder", "set store to another folder, or move it"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        return failed(
            f"{there} cannot be written to",
            f"set store to a folder of yours, or: chmod u+wx {there}",
        )
    if there == folder:
        made = ""
    else:
        made = f" (to be made in {there})"
    return passed(f"{folder}{made} is writable")


def check_records_folder(context: PreflightContext) -> CheckFinding:
    """Check, without writing, that runs/ (reports and logs) and Metaflow's records are writable on
    this machine.
    """
    runs = runs_folder(context.project_root)
    metaflow = Path(
        os.environ.get("METAFLOW_DATASTORE_SYSROOT_LOCAL")
        or records_root(context.project_root, METAFLOW_FOLDER)
    )
    folders = dict.fromkeys([runs, metaflow / METAFLOW_FOLDER])
    closed = [
        folder for folder in folders if not os.access(nearest_existing(folder), os.W_OK | os.X_OK)
    ]
    if closed:
        return failed(
            f"{' and '.join(map(str, closed))} cannot be written to",
            "set EBBFLOW_RUNS and METAFLOW_DATASTORE_SYSROOT_LOCAL to folders of yours, or make "
            "the project's writable",
        )
    if runs.is_relative_to(context.project_root):
        moved = ""
    else:
        moved = f", outside the project ({context.project_root})"
    return passed(f"{runs} is writable{moved}")


def check_store_probe(context: PreflightContext) -> CheckFinding:
    """Check that an object can be put, listed, read back unchanged and deleted in the store.

    The check ends at the first request that fails because the store is unavailable. After a
    forbidden request it continues, so that the finding names all missing permissions.
    """
    folder = store_folder(context)
    if folder is None:
        uri = context.config.store
    else:
        uri = str(folder)
    place = job_prefix(f".preflight-{secrets.token_hex(8)}")
    made = []
    if folder is not None:
        made = [
            path
            for path in [folder / place, *(folder / place).parents]
            if not os.path.lexists(path)
        ]
    try:
        return _probe(Store.open(uri, request_timeout_seconds=_REQUEST_SECONDS), place)
    except StoreError as error:
        return _failed(error)
    finally:
        for path in made:
            try:
                path.rmdir()
            except FileNotFoundError:  # the store has deleted it with the object
                continue
            except OSError:  # a job has started to use the folder
                break


def check_store_multipart(context: PreflightContext) -> CheckFinding:
    """Check that a multipart upload can be started and aborted. Commits use such uploads."""
    if not context.config.store.startswith("s3://"):
        return skipped("the store is a folder: files are not put in parts")
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.session import Session

    limits = Config(connect_timeout=4, read_timeout=8, retries={"total_max_attempts": 1})
    bucket, prefix = split_uri(context.config.store)
    key = f"{prefix}/{job_prefix('preflight')}-{secrets.token_hex(8)}".lstrip("/")
    action = "s3:PutObject"
    try:
        settings = aws_settings()
        where = {"region_name": settings.region, "endpoint_url": settings.endpoint}
        client = Session().create_client("s3", **where, config=limits)
        upload = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
        action = "s3:AbortMultipartUpload"
        client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload)
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "no code")
        missing = code in _MISSING_RIGHT
        if missing:
            fix = f"allow {action} on arn:aws:s3:::{bucket}/*"
        else:
            fix = "see the check store-probe"
        return failed(f"multipart upload: {code}", fix)
    except (BotoCoreError, StoreError) as error:
        text = " ".join(str(error).split())
        return failed(f"multipart upload: {text}", "see the check store-probe")
    return passed(f"{context.config.store}: a multipart upload was started and aborted")


def check_store_clock(context: PreflightContext) -> CheckFinding:
    """Check that this machine's clock agrees with the store's.

    S3 rejects requests if they differ by over 15 min.
    """
    if not context.config.store.startswith("s3://"):
        return skipped("the store is a folder: nothing is signed")
    try:
        settings = aws_settings()
    except StoreError as error:
        return skipped(f"the store cannot be found: {error}")
    url = settings.endpoint or f"https://s3.{settings.region}.amazonaws.com"
    return compare_clock(url, warned=_SKEW_WARNING_SECONDS, refused=_STORE_REFUSES_SECONDS)


def compare_clock(url: str, *, warned: float, refused: float) -> CheckFinding:
    """Compare this machine's clock with the Date header of a server's response.

    The check fails if the difference exceeds `warned` seconds. If it exceeds `refused` seconds, the
    finding says that the server rejects signed requests.
    """
    before = time.time()
    try:
        date = _date_of(url)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return skipped(f"{url} sends no usable Date header: {error}")
    after = time.time()
    # The header has whole seconds, and was written between the two readings of our clock.
    skew = max(before - date - 1.0, date - after, 0.0)
    if before > date:
        direction = "ahead of"
    else:
        direction = "behind"
    if skew <= warned:
        return passed(f"this machine's clock is within {max(skew, 1.0):.0f} s of {url}'s")
    if skew > refused:
        consequence = "; signed requests are refused"
    else:
        consequence = ""
    return failed(
        f"this machine's clock is {skew:,.0f} s {direction} {url}'s ({refused:.0f} s "
        f"allowed){consequence}",
        _FIX,
    )


def _probe(store: Store, place: str) -> CheckFinding:
    key = f"{place}/probe"
    written = secrets.token_bytes(_PROBE_BYTES)
    trials: dict[str, Callable[[], object]] = {
        "put": lambda: store.put(key, written),
        "list": lambda: store.list(place),
        "get": lambda: store.get(key),
        "delete": lambda: store.delete(key),
    }
    read = None
    refused = {}
    for operation, trial in trials.items():
        try:
            answer = trial()
            if operation == "get":
                read = answer
        except StoreForbidden as error:
            refused[operation] = str(error)
        except ObjectNotFound:
            if "put" not in refused:
                raise
    # One right is missing, or every request is rejected
    if len(refused) == 1 or len(refused) == len(trials):
        return _failed(next(iter(refused.values())))
    if refused:
        actions = ", ".join(ACTIONS[operation] for operation in refused)
        return failed(f"{store.uri}: forbidden: {', '.join(refused)}", f"allow {actions} there")
    if read != written:
        return failed(
            f"{store.uri}: what was read back is not what was written", "use another store"
        )
    return passed(f"{store.uri}: {', '.join(trials)} of {_PROBE_BYTES} bytes")


def _failed(error: StoreError | str) -> CheckFinding:
    detail, _, fix = str(error).partition("; fix: ")
    return failed(detail, fix or "check that the store may be read, written and deleted from")


def _date_of(url: str) -> float:
    """Send a HEAD request, and return the response's Date header as Unix time, even if the status
    is an error.

    Raises OSError, HTTPException, or ValueError for a missing or unreadable header.
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
    """HTTP handler that refuses redirects, so that the check reads the store's clock and not
    another server's.
    """

    def redirect_request(
        self,
        req: urllib.request.Request,  # noqa: ARG002 (urllib's interface)
        fp: IO[bytes],  # noqa: ARG002 (urllib's interface)
        code: int,  # noqa: ARG002 (urllib's interface)
        msg: str,  # noqa: ARG002 (urllib's interface)
        headers: HTTPMessage,  # noqa: ARG002 (urllib's interface)
        newurl: str,  # noqa: ARG002 (urllib's interface)
    ) -> None:
        return None
