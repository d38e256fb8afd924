"""Check of store addresses, with a correction for those that are not supported."""

import os
import re

from ebbflow.core.errors import StoreMisconfigured

# Matches s3://bucket, and also s3:/bucket, because a folder is hardly ever called "s3:".
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
_BUCKET = r"(?P<bucket>[A-Za-z0-9][A-Za-z0-9._-]+)"
_PREFIX = r"(?:/(?P<prefix>[^?#]*))?"
# Spellings of a place in S3 by other tools, with the scheme https:// or without
_IN_S3 = (
    re.compile(rf"(?:s3://)?arn:aws[\w-]*:s3:::{_BUCKET}{_PREFIX}", re.IGNORECASE),
    re.compile(rf"s3://(?:s3|https?):/*{_BUCKET}{_PREFIX}", re.IGNORECASE),
    re.compile(rf"(?:s3a|s3n|s3):/+{_BUCKET}{_PREFIX}", re.IGNORECASE),
    re.compile(rf"(?:https?://)?{_BUCKET}\.s3[.-](?:[a-z0-9-]+\.)*amazonaws\.com[.\w]*{_PREFIX}"),
    re.compile(rf"(?:https?://)?s3[.-](?:[a-z0-9-]+\.)*amazonaws\.com[.\w]*/{_BUCKET}{_PREFIX}"),
    re.compile(
        rf"(?:https?://)?(?:[a-z0-9-]+\.)?console\.aws\.amazon\.com/s3/(?:buckets|object)/{_BUCKET}"
        r"(?:\?(?:.*&)?prefix=(?P<prefix>[^&#]*))?.*"
    ),
)
_EXAMPLE = "a folder, or s3://bucket/prefix"
# Other addresses that are no folders, the first that matches
_REFUSED = (
    (
        re.compile(r"(?:s3://)?arn:aws[\w-]*:s3:[\w-]*:\d*:accesspoint[/:]", re.IGNORECASE),
        (
            "is an access point",
            "s3://ALIAS/prefix with its alias, which ends with -s3alias (aws s3control "
            "get-access-point)",
        ),
    ),
    (
        re.compile(r"https?://"),
        ("is a web address", "s3://bucket/prefix, and the server's address in AWS_ENDPOINT_URL"),
    ),
    (
        re.compile(r"(?:gs|gcs|az|abfss?|wasbs?|azure)://"),
        (
            "is of Google Cloud Storage or Azure, which do not return the CRC64NVME checksum by which "
            "each upload of a commit is verified",
            _EXAMPLE,
        ),
    ),
    (
        re.compile(
            r"(?:localhost|\[[0-9a-f:]+\]|[\w-]+(?:\.[\w-]+)+):\d{2,5}(?:/|$)", re.IGNORECASE
        ),
        ("is a server", "s3://bucket/prefix, and the server's address in AWS_ENDPOINT_URL"),
    ),
    (
        re.compile(r"\\\\[^\\]|[A-Za-z]:\\"),
        ("is a path of Windows", "the folder where it is mounted"),
    ),
    (
        re.compile(rf"arn:|{ADDRESS.pattern}", re.IGNORECASE),
        ("is of an unknown kind", _EXAMPLE),
    ),
)
# The names that S3 gives to buckets, and other object stores to theirs
_BUCKET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def find_address_problem(address: str) -> tuple[str, str] | None:
    """Return what is wrong with a store's address and what to write instead; None if it is valid.

    Without this check, an address in another tool's spelling would become a local folder of that
    name, and the job would look safe.
    """
    if address.startswith("file://"):
        return None
    if address.startswith("s3://") and _BUCKET_NAME.fullmatch(_bucket_of(address)):
        return _find_prefix_problem(address)
    for spelling in _IN_S3:
        match = spelling.fullmatch(address)
        if match is not None:
            place = "/".join(filter(None, [match["bucket"], (match["prefix"] or "").strip("/")]))
            return "is a place in S3", f"s3://{place}"
    return _find_foreign_problem(address)


def resolve_address(address: str) -> str:
    """Expand environment variables in a store's address, and return it.

    Raises StoreMisconfigured if it cannot be the address of a store.
    """

    def value_of(match: re.Match[str]) -> str:
        name = match[1].strip("{}")
        value = os.environ.get(name)
        if not value:
            raise StoreMisconfigured(
                f"store {address!r}: the environment variable {name} is not set; fix: set it, or "
                f"write the path without ${name}"
            )
        return value

    expanded = _VARIABLE.sub(value_of, address)
    problem = find_address_problem(expanded)
    if problem is not None:
        (wrong, fix) = problem
        raise StoreMisconfigured(f"store {expanded!r} {wrong}; fix: {fix}")
    return expanded


def _find_foreign_problem(address: str) -> tuple[str, str] | None:
    """Return the problem of an address that is neither a folder nor a valid S3 address, or None."""
    in_s3 = address.startswith("s3://")
    for spelling, problem in _REFUSED[:1] if in_s3 else _REFUSED:
        if spelling.match(address):
            return problem
    if in_s3:
        bucket = _bucket_of(address)
        wrong = f"has the bucket name {bucket!r}" if bucket else "names no bucket"
        return wrong, _EXAMPLE
    if address.startswith("~") and os.path.expanduser(address).startswith("~"):
        return "names a user who does not exist", _EXAMPLE
    return None


def _bucket_of(address: str) -> str:
    return address.removeprefix("s3://").partition("/")[0]


def _find_prefix_problem(address: str) -> tuple[str, str] | None:
    (bucket, _, prefix) = address.removeprefix("s3://").partition("/")
    parts = prefix.strip("/").split("/")
    usable = [part for part in parts if part not in ("", ".", "..")]
    if prefix.strip("/") and usable != parts:
        return "has an empty part, '.' or '..'", "/".join([f"s3://{bucket}", *usable])
    return None
