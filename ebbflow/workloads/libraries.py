"""One-line explanations, with a fix, for optional libraries that cannot be imported."""

from __future__ import annotations

import importlib.metadata
import traceback

import torch


def describe_import_failure(library: str, error: BaseException) -> str:
    """Explain in one line why a library cannot be imported, and which package to install.

    A torchvision that was built for another torch breaks the import of timm, and of transformers,
    which hides the cause in an exception of its own.
    """
    causes = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    root = causes[-1]
    text = " ".join(str(root).split())[:200] or type(root).__name__
    frames = traceback.extract_tb(root.__traceback__)
    missing = isinstance(root, ModuleNotFoundError) and (root.name or "").partition(".")[0]
    if missing:
        return _describe_missing(library, missing)
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


def _describe_missing(library: str, missing: str) -> str:
    packages = missing
    if missing == library == "timm":
        packages = "timm torchvision"
    needs = "" if missing == library else f", which {library} imports"
    if library != "timm" and missing != "torchvision":
        return f"{missing} is not installed{needs}; fix: pip install {packages}"
    return (
        f"{missing} is not installed{needs}; fix: pip install -c constraints.txt {packages}, with "
        f"torch=={torch.__version__} in that file to keep your torch"
    )
