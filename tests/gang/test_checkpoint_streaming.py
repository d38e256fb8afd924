"""An export needs memory for a window of tensors, not for all of them; what it writes is what it
was.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ebbflow.core.store import Store
from ebbflow.training.checkpoint import Checkpointer, open_generation, reachable_commits
from ebbflow.training.checkpoint.commands import main as checkpoints
from ebbflow.training.checkpoint.file_formats import read_file, write_file
from ebbflow.training.checkpoint.portable_state import read_commit
from ebbflow.training.errors import CorruptCommit
from tests.support.long_tests import mark_long

_MIB = 2**20
_PROGRAM = """
import resource, sys
from ebbflow.training.checkpoint.commands import main
import torch, torch.distributed.checkpoint, torch._subclasses.fake_tensor
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
code = main(["export", *sys.argv[1:]])
print(code, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """512 MiB in tensors of 8 MiB, and some small ones of other kinds."""
    store = Store.open(str(tmp_path_factory.mktemp("streaming") / "jobs" / "job"))
    model = nn.Module()
    generator = torch.Generator().manual_seed(1)
    for number in range(64):
        model.register_buffer(f"large{number}", torch.randn(2 * _MIB, generator=generator))
    model.register_buffer("empty", torch.empty(0, 3))
    model.register_buffer("number", torch.tensor(3, dtype=torch.int64))
    model.register_buffer("sixteen", torch.randn(5, 7, generator=generator).to(torch.bfloat16))
    with Checkpointer(
        store.uri, generation=open_generation(store, run="r", attempt=0)
    ) as checkpointer:
        checkpointer.save(1, model, None, {"cursor": 1})
        assert checkpointer.wait() is not None
    return store


@pytest.mark.parametrize("name", mark_long(["out", "out.safetensors", "out.pt"], ["out", "out.pt"]))
def test_an_export_holds_a_part_of_it_at_a_time(job: Store, tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    command = [sys.executable, "-c", _PROGRAM, job.uri, str(target)]
    done = subprocess.run(
        command,
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    code, grown = map(int, done.stdout.splitlines()[-1].split())
    assert code == 0, done.stderr
    assert grown < 256 * _MIB, f"{grown / _MIB:.0f} MiB for an export of 512 MiB"
    whole = dict(
        read_commit(job, reachable_commits(job)[0].key).stream(["model.large63", "model.sixteen"])
    )
    found = read_file(target).weights
    assert set(found) == {*(f"large{n}" for n in range(64)), "empty", "number", "sixteen"}
    assert all(torch.equal(found[key], whole[f"model.{key}"]) for key in ("large63", "sixteen"))
    assert found["number"].item() == 3 and found["empty"].shape == (0, 3)
    if target.suffix == ".pt":
        with zipfile.ZipFile(target) as archive:
            assert archive.testzip() is None, "the sums of the archive are right too"
    # The library's own writer makes the same header, but for the order of names
    if target.suffix == ".safetensors":
        save_file(load_file(target), tmp_path / "theirs.safetensors")
        theirs = load_file(tmp_path / "theirs.safetensors")
        assert all(torch.equal(theirs[key], tensor) for key, tensor in found.items())


@pytest.mark.parametrize("name", ["out", "out.safetensors", "out.pt"])
def test_damage_found_half_way_leaves_nothing_behind(job: Store, tmp_path: Path, name: str) -> None:
    ref = reachable_commits(job)[0]
    (path,) = Path(job.uri).glob("data/*/*/*")
    with path.open("r+b") as file:
        file.seek(400 * _MIB)
        kept = file.read(1)
        file.seek(400 * _MIB)
        file.write(bytes([kept[0] ^ 1]))
    try:
        with pytest.raises(CorruptCommit, match="chunk 25 has CRC64NVME"):
            kind = {"out": "dcp", "out.safetensors": "safetensors", "out.pt": "torch"}[name]
            write_file(read_commit(job, ref.key), tmp_path / name, kind)
        assert list(tmp_path.iterdir()) == []
        assert checkpoints(["export", job.uri, str(tmp_path / name)]) == 1
    finally:
        with path.open("r+b") as file:
            file.seek(400 * _MIB)
            file.write(kept)
