"""Mutation tests: are changed lines noticed?

    python -m tests.mutants --seed 3 --count 200        draw mutants, run the tests of their lines, print the survivors
    python -m tests.mutants --map                       only bring the map from lines to tests up to date
    python -m tests.mutants --count 0 FILE…             all mutants of files
    python -m tests.mutants --nearest --minutes 3       without a map: the unit tests that import the changed module

The map is kept in .mutants/ and brought up to date before the draw, outside of the time that is
printed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.mutants.equivalents import is_equivalent, read_equivalents
from tests.mutants.line_map import LineMap, guess_map, stale_test_files, update_map
from tests.mutants.mutations import Mutant, draw_mutants
from tests.mutants.trial import Result, Verdict, serve_trials

ROOT = Path(__file__).resolve().parents[2]
MAP_FILE = ROOT / ".mutants" / "map.json"
_FILES_AT_ONCE = 40  # the map is saved after this many test files
_ALLOWED_EQUIVALENTS = 0.03  # of a draw; more of them count as survivors


def main(words: list[str]) -> int:
    """Draw mutants, try them, and print the survivors.

    Returns 1 if fewer than `--at-least` percent were noticed.
    """
    options = _parse(words)
    if options.nearest:
        known = guess_map(ROOT)
    else:
        known = LineMap.load(options.map_file)
        if not options.stale:
            _bring_up_to_date(known, options)
    if options.map:
        return 0
    known.move_to(ROOT)
    if options.seed is None:
        seed = _commit_seed()
    else:
        seed = options.seed
    mutants = draw_mutants(
        ROOT, seed, options.count or sys.maxsize, options.files or None, empty=options.empty
    )
    print(f"{len(mutants)} mutants, seed {seed}", flush=True)
    began = time.monotonic()
    results = try_mutants(mutants, known, options)
    minutes = (time.monotonic() - began) / 60
    share = report(results)
    print(f"{minutes:.1f} minutes")
    return int(share < options.at_least)


def try_mutants(mutants: list[Mutant], known: LineMap, options: argparse.Namespace) -> list[Result]:
    """Try mutants in several processes, and print each survivor as soon as it is known."""
    if options.minutes:
        deadline = time.monotonic() + 60 * options.minutes
    else:
        deadline = float("inf")
    waiting = list(reversed(mutants))
    trying: dict[Connection, Mutant] = {}

    def give_next(pipe: Connection) -> None:
        if waiting and time.monotonic() < deadline:
            trying[pipe] = waiting.pop()
            pipe.send(trying[pipe])
        else:
            pipe.send(None)

    for _ in range(min(options.processes, len(waiting))):
        give_next(_start_trials(known, options))
    results: list[Result] = []
    while trying:
        for pipe in wait(list(trying)):
            assert isinstance(pipe, Connection)
            mutant = trying.pop(pipe)
            try:
                answer = pipe.recv()
            except EOFError:
                answer = Result(mutant, Verdict.KILLED, "it ended the process of its trial", 0.0)
                pipe = _start_trials(known, options)
            if isinstance(answer, Exception):
                answer = Result(mutant, Verdict.SURVIVED, f"its trial failed: {answer!r}", 0.0)
            results.append(answer)
            if answer.verdict is not Verdict.KILLED or "::" not in answer.detail:
                print(_describe(answer), flush=True)
            give_next(pipe)
    return _without_broken_tests(results, known, options)


def report(results: list[Result]) -> float:
    """Print how many mutants were noticed, and return the percentage."""
    equivalents = read_equivalents()
    declared = [
        result
        for result in results
        if result.verdict is not Verdict.KILLED and is_equivalent(result.mutant, ROOT, equivalents)
    ]
    verdicts = Counter(result.verdict for result in results)
    excused = min(len(declared), int(_ALLOWED_EQUIVALENTS * len(results)))
    share = 100 * verdicts[Verdict.KILLED] / max(1, len(results) - excused)
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()))
    print(f"{len(declared)} of them are declared equivalent, {excused} of these are left out")
    print(f"noticed: {share:.1f} %")
    return share


def _bring_up_to_date(known: LineMap, options: argparse.Namespace) -> None:
    test_files = stale_test_files(ROOT, known)
    if options.tests:
        test_files = [file for file in test_files if file in options.tests]
    if test_files:
        print(f"building the map for {len(test_files)} test files", flush=True)
    for first in range(0, len(test_files), _FILES_AT_ONCE):
        update_map(
            ROOT, known, test_files[first : first + _FILES_AT_ONCE], processes=options.processes
        )
        known.save(options.map_file)


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make mutants", description="run the tests against one-line changes"
    )
    parser.add_argument("files", nargs="*", help="decision modules; all if none is named")
    parser.add_argument(
        "--seed",
        type=int,
        help="of the draw; by default the first three bytes of the commit's hash",
    )
    parser.add_argument("--count", type=int, default=200, help="how many mutants are drawn; 0: all")
    parser.add_argument("--minutes", type=float, help="begin no further mutant after this time")
    parser.add_argument(
        "--test-seconds", type=float, default=90.0, help="longest total of the tests of one mutant"
    )
    parser.add_argument(
        "--processes", type=int, default=2, help="how many mutants are tried at once"
    )
    parser.add_argument(
        "--at-least", type=float, default=0.0, help="exit with 1 below this percentage"
    )
    parser.add_argument("--map", action="store_true", help="only build the map from lines to tests")
    parser.add_argument("--map-file", type=Path, default=MAP_FILE, help="where the map is kept")
    parser.add_argument(
        "--tests",
        action="append",
        help="bring the map up to date for this test file only (repeat it)",
    )
    parser.add_argument(
        "--empty", action="store_true", help="empty whole functions instead of changing lines"
    )
    parser.add_argument(
        "--nearest",
        action="store_true",
        help="run the unit tests that import a module, without a map",
    )
    parser.add_argument(
        "--stale", action="store_true", help="use the map as it is, without new and changed tests"
    )
    return parser.parse_args(words)


def _commit_seed() -> int:
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return int(head[:6], 16)


def _without_broken_tests(
    results: list[Result], known: LineMap, options: argparse.Namespace
) -> list[Result]:
    """Run each test that failed with a mutant once more without it; a kill by one that fails even
    then does not count.
    """
    tests = {result.detail for result in results if "::" in result.detail}
    broken: set[str] = set()
    pipe = _start_trials(known, options)
    for test in sorted(tests):
        pipe.send(test)
        try:
            passes = pipe.recv()
        except EOFError:
            passes = False
            pipe = _start_trials(known, options)
        if passes is not True:
            broken.add(test)
    pipe.send(None)
    checked: list[Result] = []
    for result in results:
        if result.detail in broken:
            result = replace(
                result, verdict=Verdict.SURVIVED, detail=f"{result.detail} fails anyway"
            )
            print(_describe(result), flush=True)
        checked.append(result)
    return checked


def _start_trials(known: LineMap, options: argparse.Namespace) -> Connection:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=serve_trials, args=(there, ROOT, known, options.test_seconds)).start()
    there.close()
    return here


def _describe(result: Result) -> str:
    mutant = result.mutant
    if result.detail:
        detail = f", {result.detail}"
    else:
        detail = ""
    return f"{mutant.path}:{mutant.line}: {mutant.change}\n    {result.verdict}{detail}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
