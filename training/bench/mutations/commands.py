"""Counts what becomes of random single changes, kind by kind, for the commits and for DCP."""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from training.bench.machine import describe_machine
from training.bench.tables import machine_line


def main(arguments: list[str]) -> int:
    """0 when every change was found or changed nothing that is loaded, else 1."""
    parser = argparse.ArgumentParser(prog="python -m training bench mutations", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000, help="changes to each of the two (default 10000)")
    parser.add_argument("--seed", type=int, default=0, help="of the changes (default 0)")
    parser.add_argument("--folder", help="where the checkpoints are made (default: the temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    given = parser.parse_args(arguments)
    figures: dict[str, Any] = {"kind": "measured", "machine": describe_machine(), "seed": given.seed}
    print(machine_line(figures["machine"]), flush=True)
    with tempfile.TemporaryDirectory(prefix="ebbflow-mutations-", dir=given.folder) as folder:
        figures |= measure(Path(folder), given.count, given.seed)
    print(f"\n{text(figures)}", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    ours = figures["contestants"]["commits"]
    return 1 if any(row["wrong"] or row["unseen"] for row in ours.values()) else 0


def measure(folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Of each contestant, by kind of change: how many, refused, reported by verifying, unseen, loaded wrong.

    unseen: loaded equal, and nothing reported: the change is in bytes that nothing reads, or in nothing that counts.
    """
    from training.bench.mutations.contestants import Commits, Dcp

    contestants = {}
    for name, kind in (("commits", Commits), ("dcp", Dcp)):
        place = folder / name
        place.mkdir()
        contestants[name] = _count(kind(place), count, random.Random(seed))
    return {"count": count, "contestants": contestants}


def _count(contestant: Any, count: int, chance: random.Random) -> dict[str, dict[str, int]]:
    from training.bench.mutations.changes import changed, kinds
    from training.bench.mutations.contestants import EQUAL, REFUSED, WRONG

    if contestant.load() != EQUAL or contestant.found_without_loading():
        raise RuntimeError("what was not changed does not load, or does not verify")
    names = kinds(contestant.parts)
    tallies: dict[str, Counter[str]] = {name: Counter() for name in names}
    for number in range(count):
        kind = names[number % len(names)]
        with changed(contestant.parts, kind, chance):
            loaded, reported = contestant.load(), contestant.found_without_loading()
        tally = tallies[kind]
        tally["changes"] += 1
        tally["refused"] += loaded == REFUSED
        tally["reported"] += reported
        tally["wrong"] += loaded == WRONG
        tally["unseen"] += loaded == EQUAL and not reported
    if contestant.load() != EQUAL or contestant.found_without_loading():
        raise RuntimeError("the last change was not undone: the figures are void")
    keys = ("changes", "refused", "reported", "unseen", "wrong")
    return {kind: {key: tally[key] for key in keys} for kind, tally in tallies.items()}


def text(figures: dict[str, Any]) -> str:
    """One table: kinds of change, and what became of them."""
    lines = [f"{'':32}{'changes':>9}{'refused':>9}{'reported':>10}{'unseen':>8}{'loaded wrong':>14}"]
    for name, rows in figures["contestants"].items():
        title = "Ebbflow's commits" if name == "commits" else "DCP, FileSystemWriter and FileSystemReader"
        total = {key: sum(row[key] for row in rows.values()) for key in next(iter(rows.values()))}
        lines += ["", title]
        lines += [_row(kind, row) for kind, row in [*rows.items(), ("all", total)]]
    about = (
        "refused: the load raised. reported: the verifying read of all objects named it; DCP has none. unseen: loaded\n"
        "equal and nothing reported. loaded wrong: other weights, without a word."
    )
    return "\n".join([*lines, "", about])


def _row(kind: str, row: dict[str, int]) -> str:
    cells = f"{row['changes']:>9,}{row['refused']:>9,}{row['reported']:>10,}{row['unseen']:>8,}{row['wrong']:>14,}"
    return f"  {kind:30}{cells}"
