"""Which files of the checkpoints are what, by where they lie. Torch-free."""

from __future__ import annotations

from pathlib import Path

from benchmarks.training.mutations.changes import Part, Parts


def parts_of(name: str, root: Path) -> Parts:
    """The last checkpoint below `root` and the one before it, of the contestant of that name."""
    return {"commits": _commits, "dcp": _dcp}[name](root)


def _commits(root: Path) -> Parts:
    """Generation 1 has the earlier commit, generation 2 the newest; keys begin with the generation,
    or inverted.
    """
    data, index = (sorted((root / kind).glob("*/*/*")) for kind in ("data", "index"))
    newest, earlier = sorted((root / "commits").glob("*/*/*"))
    ranks = len(data) // 2
    return Parts(
        root,
        {
            "data": Part(data[ranks:], data[:ranks]),
            "index": Part(index[ranks:], index[:ranks]),
            "manifest": Part([newest], [earlier]),
            "record": Part(sorted((root / "generations").iterdir()), []),
        },
    )


def _dcp(root: Path) -> Parts:
    earlier, newest = sorted(root.glob("step-*"))
    data = [Part(sorted(newest.glob("*.distcp")), sorted(earlier.glob("*.distcp")))]
    return Parts(
        root, {"data": data[0], "manifest": Part([newest / ".metadata"], [earlier / ".metadata"])}
    )
