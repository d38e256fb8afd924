"""Why an optional library cannot be imported, in one line with the fix."""

from __future__ import annotations

import importlib.metadata
import traceback

import torch


def describe_import_failure(library: str, error: BaseException) -> str:
    """Return one line for an exception that an import raised, with the package to install.

    A torchvision that was built for another torch breaks the import of timm, and of transformers,
    which hides the cause in an exception of its own.
    """
    causes = [error]
    while (
        cause := causes[-1].__cause__ or causes[-1].__context__
    ) is not None and cause not in causes:
        causes.append(cause)
    root = causes[-1]
    text = " ".join(str(root).split())[:200] or type(root).__name__
    frames = traceback.extract_tb(root.__traceback__)
    missing = isinstance(root, ModuleNotFoundError) and (root.name or "").partition(".")[0]
    if missing:
        if missing == library == "timm":
            with_its_own = " torchvision"
        else:
            with_its_own = ""
        if library == "timm" or missing == "torchvision":
            keeps = "-c constraints.txt "
        else:
            keeps = ""
        if keeps:
            why = f", with torch=={torch.__version__} in that file to keep your torch"
        else:
            why = ""
        if missing == library:
            needs = ""
        else:
            needs = f", which {library} imports"
        return (
            f"{missing} is not installed{needs}; fix: pip install "
            f"{keeps}{missing}{with_its_own}{why}"
        )
    if "torchvision" in text or any("/torchvision/" in frame.filename for frame in frames):
        try:
            version = importlib.metadata.version("torchvision").partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            version = "VERSION"
        if library == "timm":
            other = ""
        else:
            other = ", or pip uninstall torchvision, if nothing of yours needs it"
        return (
            f"{library} cannot be imported, because torchvision {version} was built for another "
            f"torch than {torch.__version__} ({text}); fix: pip install --force-reinstall "
            f"--no-deps torchvision=={version} --index-url INDEX, with the package index that "
            f"your torch is from{other}"
        )
    return (
        f"{library} cannot be imported ({type(root).__name__}: {text}); fix: pip install "
        f"--upgrade {library}"
    )
