"""Reader of bills with resource ids: AWS Cost and Usage Reports (CUR and CUR 2.0) and FOCUS 1.x, in
CSV, gzipped CSV or Parquet.

The columns are documented at https://docs.aws.amazon.com/cur/latest/userguide/data-dictionary.html
for CUR, at https://docs.aws.amazon.com/cur/latest/userguide/table-dictionary-cur2.html for CUR 2.0
(Data Exports), and at https://focus.finops.org for FOCUS. Lines are read one by one, and Parquet by
batches of rows and only in the columns that are used, since a bill may have many gigabytes.

AWS delivers a report several times, and each delivery contains the lines of the previous delivery
again. A line's id is unique only within one partition of one delivery, and the next delivery gives
the same line another id (identity/LineItemId in
https://docs.aws.amazon.com/cur/latest/userguide/identity-columns.html). A line therefore counts as
a repeat in two cases: an earlier line has the same id, time, resource, usage type and line type, or
another file has an equal line. Equal lines within one file are not repeats.
"""

import contextlib
import csv
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

from ebbflow.cost.amounts import read_decimal
from ebbflow.cost.errors import BillError

# Field of a line: normalised name of its column (`_normalise_name`).
_REQUIRED = {
    "resource_id": "line_item_resource_id",
    "start": "line_item_usage_start_date",
    "end": "line_item_usage_end_date",
    "product": "line_item_product_code",
    "usage_type": "line_item_usage_type",
    "amount": "line_item_usage_amount",
    "usd": "line_item_unblended_cost",
}
_OPTIONAL = {
    "line_type": "line_item_line_item_type",
    "zone": "line_item_availability_zone",
    "instance_type": "product_instance_type",
    "currency": "line_item_currency_code",
    "invoice": "bill_invoice_id",
    "tags": "resource_tags",
    "line_id": "identity_line_item_id",
}
# The same of FOCUS. `x_` columns are AWS's own.
_FOCUS_REQUIRED = {
    "resource_id": "resource_id",
    "start": "charge_period_start",
    "end": "charge_period_end",
    "usd": "billed_cost",
}
_FOCUS_OPTIONAL = {
    "amount": "consumed_quantity",
    "priced_amount": "pricing_quantity",
    "unit": "consumed_unit",
    "priced_unit": "pricing_unit",
    "usage_type": "x_usage_type",
    "meter": "sku_meter",
    "category": "charge_category",
    "pricing": "pricing_category",
    "service": "service_category",
    "service_name": "service_name",
    "zone": "availability_zone",
    "resource_type": "resource_type",
    "currency": "billing_currency",
    "provider": "provider_name",
    "tags": "tags",
}
_HOURS = frozenset({"hours", "hour", "hrs"})
# Rows of a Parquet file that are in memory at once.
_BATCH_ROWS = 10_000
_TAG = re.compile(r"^resource_tags_(?:user_)?(.+)$")
_INSTANCE_USE = re.compile(
    r"(?:^|-)(BoxUsage|SpotUsage|DedicatedUsage|HostBoxUsage|ReservedBoxUsage)(?::(.+))?$"
)
# Part of the usage types of EBS volumes, and their service in the bills of `write_focus`, which have
# no usage types.
_VOLUME_USE = "EBS:Volume"
_VOLUME_SERVICE = "Amazon Elastic Block Store"
_USE = frozenset({"Usage", "DiscountedUsage", "SavingsPlanCoveredUsage"})
SYNTHETIC = "synthetic"


@dataclass(frozen=True, kw_only=True)
class BillLine:
    """One line of a bill."""

    resource_id: str
    # start, end: Unix seconds of the start and end of the billed hour or day
    start: float
    end: float
    kind: str  # "instance", "storage", "transfer" or "other"
    usage_type: str
    line_type: str
    amount: Decimal  # usage amount in the unit of the usage type; hours for an instance
    usd: Decimal  # exact unblended cost in dollars
    zone: str
    instance_type: str
    market: str  # "spot" or "on_demand" for instances, else empty
    tags: Mapping[str, str]  # values by normalised key (`normalise_tag`)
    synthetic: bool = False  # whether the report's invoice id marks it as synthetic
    # The report's id for the line, unique within one delivery; empty if the report has no ids
    line_id: str = ""
    # Index of the file that contains the line, if several report files are read together
    delivery: int = 0
    where: str = ""  # file name and line number, for error messages

    @property
    def seconds(self) -> float:
        """Billed seconds of an instance; 0 for other lines."""
        if self.kind == "instance":
            return round(float(self.amount) * 3600, 6)
        return 0.0

    @property
    def is_volume(self) -> bool:
        """Whether the line is of an EBS volume."""
        return self.kind == "storage" and (
            _VOLUME_USE in self.usage_type or self.resource_id.startswith("vol-")
        )


class RepeatFilter:
    """Filter that recognises repeated bill lines.

    It keeps every line in memory. A bill may have millions of lines, so pass only the lines of one
    job.
    """

    def __init__(self) -> None:
        self._by_id: dict[tuple[str, ...], tuple[Decimal, Decimal]] = {}
        self._alike: dict[tuple[Any, ...], Counter[int]] = {}

    def is_repeat(self, line: BillLine) -> bool:
        """Return whether the line repeats an earlier line, as defined in the module's docstring.

        The filter remembers the line for later calls.

        Raises:
            BillError: An earlier line has the same id, time, resource and types, but another amount
                or cost.
        """
        use = (line.resource_id, line.usage_type, line.line_type, line.start, line.end)
        name = (line.line_id, *map(str, use))
        if line.line_id and name in self._by_id:
            amount, usd = self._by_id[name]
            if (amount, usd) != (line.amount, line.usd):
                raise BillError(
                    f"{line.where}: an earlier line has {amount} for ${usd}, but this line has "
                    f"{line.amount} for ${line.usd}: two deliveries of one report that differ; "
                    "fix: pass only the newest one"
                )
            return True
        self._by_id[name] = line.amount, line.usd
        times = self._alike.setdefault((*use, line.amount, line.usd), Counter())
        times[line.delivery] += 1
        return times[line.delivery] <= max(
            (n for file, n in times.items() if file != line.delivery), default=0
        )


def read_bill(path: Path, delivery: int = 0) -> Iterator[BillLine]:
    """Yield the lines of a report one by one.

    Args:
        delivery: Index of this file, if several report files are read together.

    Raises:
        BillError: The file is unreadable or invalid. The message has file:line, the column and the
            problem.
    """
    if path.suffix == ".parquet":
        rows = _parquet_rows(path)
    else:
        rows = _csv_rows(path)
    for where, row in rows:
        yield _line(row, where, delivery)


def normalise_tag(key: str) -> str:
    """Reduce a tag's key to lower-case letters and digits, without the prefix "aws" or "user".

    Reports spell the same key in several ways, such as user:ebbflow-job and user_ebbflow_job.
    """
    return re.sub(r"[^a-z0-9]", "", re.sub(r"^(?:aws|user)[:_]", "", key.lower()))


def _csv_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with (
            gzip.open(path, "rt", newline="", encoding="utf-8-sig")
            if path.suffix == ".gz"
            else path.open(newline="", encoding="utf-8-sig") as file
        ):
            reader = csv.reader(file)
            names = [_normalise_name(name) for name in next(reader, [])]
            _check_columns(names, path)
            for row in reader:
                if row:
                    yield f"{path}:{reader.line_num}", dict(zip(names, row, strict=False))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise BillError(f"{path}: cannot be read: {error}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise BillError(
            f"{path}: reading Parquet needs pyarrow, which is not installed; fix: pip install "
            "pyarrow, or have the report delivered as CSV"
        ) from error
    try:
        with ParquetFile(path) as file:
            columns = {name: _normalise_name(name) for name in file.schema_arrow.names}
            _check_columns(list(columns.values()), path)
            used = [name for name, normal in columns.items() if _is_used(normal)]
            number = 0
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=used):
                for row in batch.to_pylist():
                    number += 1
                    yield (
                        f"{path}: row {number}",
                        {columns[name]: value for name, value in row.items()},
                    )
    except (OSError, ArrowException) as error:
        raise BillError(f"{path}: cannot be read: {error}") from error


def _is_used(column: str) -> bool:
    tables = (_REQUIRED, _OPTIONAL, _FOCUS_REQUIRED, _FOCUS_OPTIONAL)
    return column.startswith("resource_tags") or any(column in table.values() for table in tables)


def _normalise_name(name: str) -> str:
    """Convert a column name such as lineItem/UsageStartDate to line_item_usage_start_date.

    Keep tag keys unchanged.
    """
    head, slash, rest = name.strip().partition("/")
    if slash and head == "resourceTags":
        return f"resource_tags_{rest}"
    if slash:
        words = f"{head}_{rest}"
    else:
        words = head
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", words).lower()


def _is_focus(names: Container[str]) -> bool:
    return "billed_cost" in names and "charge_period_start" in names


def _check_columns(names: list[str], path: Path) -> None:
    if _is_focus(names):
        missing = [column for column in _FOCUS_REQUIRED.values() if column not in names]
        if missing:
            raise BillError(f"{path}: not a FOCUS bill with resources: it lacks {missing[0]}")
        return
    missing = [column for column in _REQUIRED.values() if column not in names]
    if missing:
        raise BillError(
            f"{path}: not a Cost and Usage Report with resource ids: it lacks "
            f"{', '.join(missing)}; fix: create the report with 'include resource IDs' and "
            "hourly granularity"
        )


def _line(row: Mapping[str, Any], where: str, delivery: int) -> BillLine:
    if _is_focus(row):
        return _focus_line(row, where, delivery)
    found = {name: _read_text(row, column) for name, column in {**_REQUIRED, **_OPTIONAL}.items()}
    currency = found["currency"] or "USD"
    if currency != "USD":
        raise BillError(
            f"{where}: line_item_currency_code is {currency}; only bills in USD are read"
        )
    line_type = found["line_type"] or "Usage"
    # Negations, fees, credits and taxes repeat the usage of other lines, whose time would count
    # twice.
    if line_type in _USE:
        usage = _INSTANCE_USE.search(found["usage_type"])
    else:
        usage = None
    start, end = _period(found, _REQUIRED, where)
    amount = _number(found["amount"] or "0", "line_item_usage_amount", where)
    usd = _number(found["usd"] or "0", "line_item_unblended_cost", where)
    if usage and min(amount, usd) < 0:
        raise BillError(
            f"{where}: {amount} hours of an instance for ${usd}: a {line_type} line is never "
            "negative"
        )
    market = ""
    if usage:
        market = "spot" if usage.group(1) == "SpotUsage" else "on_demand"
    return BillLine(
        resource_id=found["resource_id"].rpartition("/")[2],
        start=start,
        end=end,
        kind=_kind(found["product"], found["usage_type"], usage is not None),
        usage_type=found["usage_type"],
        line_type=line_type,
        amount=amount,
        usd=usd,
        zone=found["zone"],
        instance_type=found["instance_type"] or (usage.group(2) or "" if usage else ""),
        market=market,
        tags=_tags(row, "resource_tags"),
        synthetic=found["invoice"] == SYNTHETIC,
        line_id=found["line_id"],
        delivery=delivery,
        where=where,
    )


def _focus_line(row: Mapping[str, Any], where: str, delivery: int) -> BillLine:
    table = {**_FOCUS_REQUIRED, **_FOCUS_OPTIONAL}
    found = {name: _read_text(row, column) for name, column in table.items()}
    if found["currency"] not in ("", "USD"):
        raise BillError(f"{where}: BillingCurrency is {found['currency']}; only USD is read")
    line_type = found["category"] or "Usage"
    start, end = _period(found, _FOCUS_REQUIRED, where)
    hours = found["amount"]
    unit = found["unit"].lower()
    if unit not in _HOURS:
        hours = found["priced_amount"]
        unit = found["priced_unit"].lower()
    usage_type = found["usage_type"] or found["meter"]
    if not usage_type and found["service_name"] == _VOLUME_SERVICE:
        usage_type = _VOLUME_USE
    usage = _INSTANCE_USE.search(usage_type)
    resource = found["resource_id"].rpartition("/")[2]
    runs = usage is not None or (
        not found["usage_type"] and found["service"] == "Compute" and resource.startswith("i-")
    )
    instance = line_type == "Usage" and unit in _HOURS and runs
    amount = _number((hours if instance else found["amount"]) or "0", "consumed_quantity", where)
    usd = _number(found["usd"] or "0", "billed_cost", where)
    if instance and min(amount, usd) < 0:
        raise BillError(f"{where}: {amount} hours of an instance for ${usd}: never negative")
    if found["pricing"] == "Dynamic" or (usage is not None and usage.group(1) == "SpotUsage"):
        market = "spot"
    else:
        market = "on_demand"
    if usage is not None and usage.group(2):
        instance_type = usage.group(2)
    elif "." in found["resource_type"]:
        instance_type = found["resource_type"]
    else:
        instance_type = ""
    kind = _kind(found["service"], usage_type, instance)
    if kind == "other" and found["service"] == "Storage":
        kind = "storage"
    return BillLine(
        resource_id=resource,
        start=start,
        end=end,
        kind=kind,
        usage_type=usage_type,
        line_type=line_type,
        amount=amount,
        usd=usd,
        zone=found["zone"],
        instance_type=instance_type if instance else "",
        market=market if instance else "",
        tags=_tags(row, "tags"),
        synthetic="simulated" in found["provider"],
        delivery=delivery,
        where=where,
    )


def _period(
    found: Mapping[str, str], columns: Mapping[str, str], where: str
) -> tuple[float, float]:
    """Return the start and end of a line in Unix seconds."""
    start, end = (_time(found[name], columns[name], where) for name in ("start", "end"))
    if end < start:
        raise BillError(
            f"{where}: {columns['end']} {found['end']} is before the start, {found['start']}"
        )
    return start, end


def _read_text(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    # Pandas has NaN for an empty cell, which differs from itself
    if value is None or value != value:
        return ""
    return str(value).strip()


def _kind(product: str, usage_type: str, instance: bool) -> str:
    if instance:
        return "instance"
    if "DataTransfer" in usage_type or "-Bytes" in usage_type:
        return "transfer"
    if "EBS:" in usage_type or product == "AmazonS3":
        return "storage"
    return "other"


def _tags(row: Mapping[str, Any], column: str) -> dict[str, str]:
    """Read a line's tags.

    CUR has one column per tag. CUR 2.0 and FOCUS have a single column with all tags: JSON in CSV, a
    map in Parquet, which is read as pairs.
    """
    tags = {
        normalise_tag(found.group(1)): str(row[name])
        for name in row
        if (found := _TAG.match(name)) and _read_text(row, name)
    }
    given = row.get(column)
    if isinstance(given, Mapping):
        pairs = list(given.items())
    elif isinstance(given, str):
        pairs = _json_tags(given.strip())
    elif given is None or given != given:
        pairs = []
    else:
        pairs = list(given)
    return tags | {normalise_tag(str(key)): str(value) for key, value in pairs if value is not None}


def _json_tags(text: str) -> list[tuple[str, Any]]:
    if not text.startswith("{"):
        return re.findall(r"\('([^']+)', '([^']*)'\)", text)
    # Some writers use single quotes. Valid JSON is tried first, since a value may hold one, such as
    # O'Brien.
    for attempt in (text, text.replace("'", '"')):
        with contextlib.suppress(ValueError, RecursionError):
            return list(json.loads(attempt).items())
    return []


def _time(text: str, column: str, where: str) -> float:
    try:
        return _unix_seconds(text)
    except ValueError as error:
        raise BillError(
            f"{where}: {column}: {text!r} is not a time such as 2026-11-20T10:00:00Z"
        ) from error


# A bill has few different hours.
@lru_cache(maxsize=4096)
def _unix_seconds(text: str) -> float:
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _number(text: str, column: str, where: str) -> Decimal:
    try:
        return read_decimal(text)
    except ValueError as error:
        raise BillError(f"{where}: {column}: {error}") from None
