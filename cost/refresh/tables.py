"""The tables with what AWS said taken in: nothing that is still unknown is lost, everything says of which day it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from cost.catalogue import (
    ADVISOR_COLUMNS,
    INSTANCE_COLUMNS,
    ON_DEMAND_COLUMNS,
    Catalogue,
    InstanceType,
    load_catalogue,
)
from cost.refresh.aws import ADVISOR_URL, Hardware

_PRICES_HEAD = (
    "# AWS on-demand prices of GPU instance types, Linux, shared tenancy, from the public price list. recorded: the day"
    " of each.\n# A type that is not listed for a region has no price on record there; another region's never stands in"
    " for it.\n"
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a refresh made of a table: how many lines it has, and in words what is new, other or left out."""

    lines: int
    said: tuple[str, ...]


def write_on_demand(
    path: Path, catalogue: Catalogue, listed: Mapping[str, Mapping[str, Decimal]], today: str
) -> Change:
    """listed: by region and type. Other regions' lines stay, and so do, with their old day, types no longer listed."""
    lines, said = {}, []
    known = {(region, kind.name): price for kind in catalogue.types for region, price in kind.on_demand.items()}
    for key, price in known.items():
        lines[key] = f"{key[0]},{key[1]},{price.usd_per_hour:f},{price.recorded}"
    names = {kind.name for kind in catalogue.types}
    for region, prices in listed.items():
        for name, usd in sorted(prices.items()):
            if name not in names:
                continue
            usd = usd.normalize()
            lines[region, name] = f"{region},{name},{usd:f},{today}"
            old = known.get((region, name))
            if old is not None and old.usd_per_hour != usd:
                said.append(f"{name} in {region}: ${old.usd_per_hour:f} of {old.recorded} is now ${usd:f}")
        gone = [name for of, name in known if of == region and name not in prices]
        said += [f"{name} in {region}: no longer listed; its price of the day it was recorded stays" for name in gone]
    _write(path, _PRICES_HEAD, ON_DEMAND_COLUMNS, [lines[key] for key in sorted(lines)])
    return Change(lines=len(lines), said=tuple(said))


def write_advisor(
    path: Path, catalogue: Catalogue, bands: Mapping[tuple[str, str], tuple[int, int]], today: str
) -> Change:
    """The whole table anew, of the catalogue's types."""
    names = {kind.name for kind in catalogue.types}
    rows = [
        f"{region},{name},{savings},{band}"
        for (region, name), (savings, band) in sorted(bands.items())
        if name in names
    ]
    head = (
        f"# AWS Spot Instance Advisor, all regions, Linux, recorded {today} ({ADVISOR_URL}).\n"
        "# Only the types of instances.csv; a type that is not listed for a region was not advised on there.\n"
        "# savings_percent: against the on-demand price of the region. interruption_band: share of spot capacity "
        "reclaimed in the trailing month: 0 below 5 %, 1 5-10 %, 2 10-15 %, 3 15-20 %, 4 above 20 %.\n"
    )
    _write(path, head, ADVISOR_COLUMNS, rows)
    return Change(lines=len(rows), said=())


def write_instances(path: Path, catalogue: Catalogue, found: Sequence[Hardware], gpus: Iterable[str]) -> Change:
    """Types that are new, with a GPU that gpus.csv knows; what is on record of the others stays, and is compared."""
    known = {kind.name: kind for kind in catalogue.types}
    lines = {kind.name: _line(kind.name, kind.gpu.name, kind) for kind in catalogue.types}
    said = []
    for one in found:
        if one.name in known:
            said += _differences(one, known[one.name])
        elif one.gpu not in set(gpus):
            said.append(f"{one.name}: left out, because gpus.csv has no {one.gpu}; add its peaks with their source")
        elif one.network_gbps is None:
            said.append(f"{one.name}: left out, because EC2 states no baseline of its network")
        else:
            lines[one.name] = _line(one.name, one.gpu, one)
            said.append(f"{one.name}: new, {one.gpu_count} × {one.gpu}")
    head = "".join(f"{line}\n" for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    _write(path, head, INSTANCE_COLUMNS, [lines[name] for name in sorted(lines)])
    return Change(lines=len(lines), said=tuple(said))


def reread(folder: Path) -> Catalogue:
    """The tables of a folder as a catalogue: what was written can be read. Raises CatalogueError."""
    return load_catalogue(
        folder / "instances.csv", folder / "gpus.csv", folder / "spot_advisor.csv", folder / "on_demand.csv"
    )


def _line(name: str, gpu: str, one: Hardware | InstanceType) -> str:
    numbers = (one.gpu_count, one.gpu_memory_mib, one.vcpu, f"{one.ram_gib:g}", f"{one.network_gbps:g}")
    return ",".join(map(str, (name, gpu, *numbers, "yes" if one.efa else "no")))


def _differences(one: Hardware, known: InstanceType) -> list[str]:
    """A table's figure may be the better one (sustained, not listed), so that a person decides."""
    pairs = {"gpu_count": (one.gpu_count, known.gpu_count), "vcpu": (one.vcpu, known.vcpu), "efa": (one.efa, known.efa)}
    pairs |= {"network_gbps": (one.network_gbps, known.network_gbps), "ram_gib": (one.ram_gib, known.ram_gib)}
    return [
        f"{one.name}: {key} is {ours} here, {theirs} by EC2; the table's stays"
        for key, (theirs, ours) in pairs.items()
        if theirs is not None and theirs != ours
    ]


def _write(path: Path, head: str, columns: Sequence[str], rows: Sequence[str]) -> None:
    path.write_text(head + ",".join(columns) + "\n" + "".join(f"{row}\n" for row in rows), encoding="utf-8")
