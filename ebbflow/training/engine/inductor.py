"""torch's cache of compiled code, kept in the store, so that a start on another machine compiles
less.

The cache has Inductor's and autograd's graphs and, on a GPU, Triton's kernels. torch finds an entry
by a hash of its graph, so entries that do not fit are not used. It is unpickled, so a forged one
could run code.
"""

import hashlib
import json
import platform
import threading
from collections.abc import Callable

import torch

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import ObjectNotFound
from ebbflow.core.layout import compile_cache_key
from ebbflow.core.store import Store
from ebbflow.training.gang import Gang

_MODEL = {"model", "parallel", "ddp", "fsdp", "workload", "workload_options"}


def open_compile_cache(config: RunConfig, gang: Gang, store: Store) -> Callable[[int], object]:
    """Load the cache of this torch release, device and model, if the store has it.

    Return a function to call before each step, which saves the cache in the background after the
    first step. A cache that cannot be loaded or saved is reported and ends no job.
    """
    if (
        not (config.parallel.compile and config.parallel.compile_cache)
        or config.checkpoint.signing_key_env
    ):
        return lambda _: None
    on_gpu = gang.device.type == "cuda"
    # Code for a CPU is cached as source for one width of vectors, and computes wrong values with
    # another.
    if on_gpu:
        kind = torch.cuda.get_device_name(gang.device)
    else:
        # The compiler, which takes a second to import
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        kind = f"{platform.machine()} {pick_vec_isa()}"
    instructions = torch.backends.cpu.get_cpu_capability()
    settings = config.model_dump(mode="json", include=_MODEL)
    about = [
        torch.__version__,
        platform.python_version(),
        str(gang.device),
        kind,
        instructions,
        settings,
    ]
    key = compile_cache_key(hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest())
    loaded = b""
    steps = []

    def report(what: str) -> None:
        print(f"rank {gang.rank}: compile cache {store.uri}/{key}: {what}", flush=True)

    try:
        loaded = store.get(key)
        if torch.compiler.load_cache_artifacts(loaded) is None:
            report(f"torch cannot read its {len(loaded)} bytes; compiling anew")
    except ObjectNotFound:
        pass
    except Exception as error:
        report(f"not loaded: {type(error).__name__}: {error}; compiling anew")

    def save() -> None:
        try:
            found = torch.compiler.save_cache_artifacts()
            if found is not None and len(found[0]) > len(loaded):
                store.put(key, found[0])
        except Exception as error:
            report(f"not saved: {type(error).__name__}: {error}")

    def reach(step: int) -> None:
        steps.append(step)
        # One rank for each GPU of node 0, or rank 0
        if len(steps) == 2 and gang.rank == (gang.device.index or 0):
            threading.Thread(target=save, name="compile cache", daemon=True).start()

    return reach
