"""ListObjectsV2: pages, prefixes, delimiters. Version 1 is refused."""

from __future__ import annotations

import base64
import binascii
from urllib.parse import quote

from tests.support.s3.objects import Bucket
from tests.support.s3.refusals import Refused
from tests.support.s3.request import Answer, Request
from tests.support.s3.xml_text import Content, document, time_text

PAGE = 1000


def list_objects(request: Request, bucket: Bucket) -> Answer:
    """One page.

    The token is the last name shown: what is put before it meanwhile is not shown, as on S3.
    """
    query = request.query
    if query.get("list-type") != "2":
        raise Refused("NotImplemented", "only version 2 of listings is known")
    try:
        limit = min(int(query.get("max-keys", PAGE)), PAGE)
    except ValueError:
        raise Refused("InvalidArgument", f"max-keys is {query['max-keys']!r}") from None
    prefix = query.get("prefix", "")
    delimiter = query.get("delimiter", "")
    if "continuation-token" in query:
        after = _token(query["continuation-token"])
    else:
        after = query.get("start-after", "")
    rows: list[tuple[str, Content]] = []
    shown = set()
    last = ""
    truncated = False
    for key, stored in bucket.listed(prefix):
        rest = key[len(prefix) :]
        if delimiter and delimiter in rest:
            common = prefix + rest.partition(delimiter)[0] + delimiter
        else:
            common = None
        name = common or key
        if name <= after or name in shown or (common and after.startswith(common)):
            continue
        if len(shown) == limit:
            truncated = True
            break
        shown.add(name)
        last = name
        if common:
            rows.append(("CommonPrefixes", [("Prefix", _name(common, query))]))
            continue
        about = [("LastModified", time_text(stored.modified)), ("ETag", f'"{stored.etag}"')]
        size = [("Size", str(len(stored.data))), ("StorageClass", "STANDARD")]
        rows.append(("Contents", [("Key", _name(key, query)), *about, *size]))
    head: list[tuple[str, Content]] = [("Name", bucket.name), ("Prefix", _name(prefix, query))]
    head += [
        ("MaxKeys", str(limit)),
        ("KeyCount", str(len(shown))),
        ("IsTruncated", str(truncated).lower()),
    ]
    if "encoding-type" in query:
        head.append(("EncodingType", query["encoding-type"]))
    if truncated and limit:
        head.append(("NextContinuationToken", base64.urlsafe_b64encode(last.encode()).decode()))
    return Answer(body=document("ListBucketResult", [*head, *rows]))


def _name(name: str, query: dict[str, str]) -> str:
    if query.get("encoding-type") == "url":
        return quote(name, safe="/-_.~")
    return name


def _token(text: str) -> str:
    try:
        return base64.urlsafe_b64decode(text.encode()).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise Refused("InvalidArgument", "the continuation token is none of ours") from None
