"""The private names of torch that Ebbflow uses, and a check that this release of torch has them.

A release of torch that is newer than the tested ones is accepted if it has these names.
"""

import importlib
from collections.abc import Iterator

# Module, and dotted name in it
_MODULE_NAMES = (
    ("torch", "_foreach_norm"),
    ("torch._C._distributed_c10d", "FileStore"),
    ("torch._C._distributed_c10d", "HashStore"),
    ("torch._C._distributed_c10d", "PrefixStore"),
    ("torch._C._distributed_c10d", "Store"),
    ("torch._C._distributed_c10d", "TCPStore"),
    ("torch._C._distributed_c10d", "Reducer.prepare_for_forward"),
    ("torch._C._distributed_c10d", "Reducer.prepare_for_backward"),
    ("torch._C._distributed_c10d", "Reducer._rebuild_buckets"),
    ("torch.distributed.distributed_c10d", "_set_pg_timeout"),
    ("torch.autograd", "Variable._execution_engine.queue_callback"),
    ("torch.cuda.memory", "_record_memory_history"),
    ("torch.cuda.memory", "_dump_snapshot"),
    ("torch.utils._pytree", "tree_leaves"),
    ("torch.utils._pytree", "tree_map"),
    ("torch.utils._python_dispatch", "TorchDispatchMode"),
)
# Without them training is the same, but a hang is explained with less evidence
_EVIDENCE_NAMES = (
    ("torch._C._distributed_c10d", "_WorkerServer"),
    ("torch._C._distributed_c10d", "_dump_fr_trace_json"),
)


def find_missing_names() -> list[str]:
    """Return the names that training needs and this release of torch lacks.

    An example of such a name is "torch.cuda.memory._dump_snapshot".
    """
    return list(_find_missing(_MODULE_NAMES))


def describe_release(version: str, tested: tuple[int, ...]) -> str:
    """Return a note if this release of torch is newer than `tested`, such as (2, 13), else "".

    Raises:
        ImportError: the release lacks names that Ebbflow needs.
    """
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers <= tested:
        return ""
    newest = ".".join(map(str, tested))
    missing = find_missing_names()
    if missing:
        raise ImportError(
            f"torch {version} is newer than the tested {newest} and lacks {', '.join(missing)}; "
            f"fix: pip install torch=={newest}.0"
        )
    note = f"torch {version} is newer than the tested {newest}, and has the names that Ebbflow uses"
    lost = list(_find_missing(_EVIDENCE_NAMES))
    if lost:
        note += f"; without {', '.join(lost)}, a hang is explained with less evidence"
    return note


def _find_missing(names: tuple[tuple[str, str], ...]) -> Iterator[str]:
    for module_name, name in names:
        try:
            value: object = importlib.import_module(module_name)
            for part in name.split("."):
                value = getattr(value, part)
        except (ImportError, AttributeError):
            yield f"{module_name}.{name}"
