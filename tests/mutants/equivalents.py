"""Mutants that change nothing that a test could see, with the reason, one line each in
equivalents.txt.
"""

from __future__ import annotations

from pathlib import Path

from tests.mutants.mutations import Mutant

_FILE = Path(__file__).with_name("equivalents.txt")


def read_equivalents(file: Path = _FILE) -> set[tuple[str, str, str]]:
    """Read the path, the source line and the change of each declared mutant.

    Raises:
        ValueError: A line has not the form `path | source line | change | reason`.
    """
    declared: set[tuple[str, str, str]] = set()
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = [part.strip() for part in line.split(" | ")]
        if len(parts) != 4 or not all(parts):
            raise ValueError(
                f"{file.name}:{number}: expected `path | source line | change | reason`"
            )
        path, source_line, change, _ = parts
        declared.add((path, source_line, change))
    return declared


def is_equivalent(mutant: Mutant, root: Path, declared: set[tuple[str, str, str]]) -> bool:
    """Return whether a mutant is declared: same file, same text of its first line, same change."""
    line = (root / mutant.path).read_text().splitlines()[mutant.line - 1].strip()
    return (mutant.path, line, mutant.change) in declared
