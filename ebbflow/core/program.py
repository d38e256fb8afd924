"""Start-up code of every program: project folders, missing packages, and output on any terminal.

This module imports only the standard library, and can be parsed by Python versions that are too old
for the other modules.
"""

import codecs
import contextlib
import locale
import os
import shlex
import shutil
import sys
from pathlib import Path

PACKAGE_ROOT = Path(__file__).resolve().parents[1]  # the folder `ebbflow`
IMPORT_ROOT = PACKAGE_ROOT.parent  # on sys.path, `import ebbflow` works
INSTALLED = IMPORT_ROOT.name in {"site-packages", "dist-packages"}
_PROJECT_VARIABLE = "EBBFLOW_PROJECT"
# Modules that a required package installs besides its own
_PART_OF = {
    "pydantic_core": "pydantic",
    "typing_extensions": "pydantic",
    "botocore": "boto3",
}


def _find_configs() -> Path:
    """Return the folder of the configurations that come with the project.

    In a checkout this is the link at its top.
    """
    linked = IMPORT_ROOT / "configs"
    if linked.resolve() == PACKAGE_ROOT / "configs":
        return linked
    return PACKAGE_ROOT / "configs"


DEFAULT_CONFIG = _find_configs() / "laptop.yaml"


def _find_project() -> Path:
    """Return the project's folder, to which relative paths and runs/ refer.

    It is EBBFLOW_PROJECT if that is set. Else it is the checkout if the program was started inside
    it, else the current directory. In Metaflow's code package it is the package's folder.
    """
    if given := os.environ.get(_PROJECT_VARIABLE):
        return Path(given).absolute()
    here = Path(os.environ.get("PWD", "/"))
    is_checkout = (IMPORT_ROOT / "setup.cfg").is_file()
    with contextlib.suppress(OSError):  # the directory was deleted
        here = Path.cwd()
    if INSTALLED or (is_checkout and not here.is_relative_to(IMPORT_ROOT)):
        return here
    return IMPORT_ROOT


# Relative paths in a configuration file start here, and runs/ is written here
PROJECT_ROOT = _find_project()
_OLDEST_PYTHON = (3, 11)
_PREFLIGHT_CODE = 3  # Outcome.PREFLIGHT, whose module needs Python 3.11
REPLACE_UNPRINTABLE = "ebbflow-plain"  # name of an error handler for str.encode
# ASCII in place of the characters that our own output uses.
_PLAIN = {
    "│": "|",
    "┌": "+",
    "└": "+",
    "─": "-",
    "–": "-",
    "—": "-",
    "−": "-",
    "·": "|",
    "×": "x",
    "÷": "/",
    "…": "...",
    "→": "->",
    "←": "<-",
    "›": ">",
    "≤": "<=",
    "≥": ">=",
    "≠": "!=",
    "≈": "~",
    "±": "+-",
    "²": "^2",
    "µ": "u",
    "μ": "u",
    "’": "'",
    "“": '"',
    "”": '"',
    "°": " deg",
    "✓": "ok",
    "✗": "x",
    "\N{NO-BREAK SPACE}": " ",
}


def begin_program() -> None:
    """Prepare a program's streams and error messages; call it before importing third-party
    packages.

    If Python is too old, print one line and exit with code 3. Install an exception hook that also
    prints one line and exits, without a traceback, if a package is missing.
    """
    _open_missing_streams()
    print_on_any_terminal()
    _leave_ascii_locale()
    # For child processes with another directory
    os.environ.setdefault(_PROJECT_VARIABLE, str(PROJECT_ROOT))
    if sys.version_info < _OLDEST_PYTHON:
        version = ".".join(str(part) for part in sys.version_info[:3])
        sys.exit(
            _refuse(
                f"Python 3.11 or newer is needed, {sys.executable} is {version}; fix: "
                f"{_right_command()}"
            )
        )
    sys.excepthook = _explain_missing_package


def _open_missing_streams() -> None:
    """Open /dev/null in place of each closed stdin, stdout or stderr (`>&-`).

    Otherwise the next file that is opened would take its descriptor.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - open for as long as the process
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _leave_ascii_locale() -> None:
    """Change an ASCII locale to C.UTF-8, because Metaflow refuses ASCII.

    Output remains ASCII.
    """
    if codecs.lookup(locale.getpreferredencoding(False)).name == "ascii":
        os.environ.setdefault("PYTHONIOENCODING", "ascii")
        os.environ["LC_ALL"] = "C.UTF-8"
        with contextlib.suppress(locale.Error):  # not installed
            locale.setlocale(locale.LC_CTYPE, "")


def python_path(environment=os.environ):  # type: ignore[no-untyped-def]
    """Return the PYTHONPATH with which a child process can import ebbflow.

    Args:
        environment: variables of the child process.
    """
    if INSTALLED:
        own = None  # site-packages must not come before the standard library
    else:
        own = str(IMPORT_ROOT)
    return os.pathsep.join(filter(None, [own, environment.get("PYTHONPATH")]))


def own_command():  # type: ignore[no-untyped-def]
    """Return the command that runs `ebbflow` when typed in the current directory."""
    if shutil.which("ebbflow"):
        return "ebbflow"
    beside = Path(sys.executable).with_name("ebbflow")
    shown = beside
    with contextlib.suppress(OSError):  # the directory was deleted
        if beside.is_relative_to(PROJECT_ROOT):
            shown = os.path.relpath(beside)
        else:
            shown = beside
    if beside.exists():
        return shlex.quote(str(shown))
    return f"{shlex.quote(sys.executable)} -m ebbflow"


def print_on_any_terminal() -> None:
    """Let stdout and stderr replace characters that the terminal cannot encode, instead of
    failing.
    """
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=REPLACE_UNPRINTABLE)


def _replace_unprintable(error):  # type: ignore[no-untyped-def]
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    escaped = (
        _PLAIN.get(each) or each.encode("ascii", "backslashreplace").decode("ascii")
        for each in text
    )
    return "".join(escaped), error.end


codecs.register_error(REPLACE_UNPRINTABLE, _replace_unprintable)


def _explain_missing_package(kind, error, trace):  # type: ignore[no-untyped-def]
    """Explain a missing required package in one line, and exit; print other errors as usual.

    Used as sys.excepthook.
    """
    module = (getattr(error, "name", None) or "").partition(".")[0]
    module = _PART_OF.get(module, module)
    if not issubclass(kind, ModuleNotFoundError) or module not in _needed_modules():
        sys.__excepthook__(kind, error, trace)
        return
    fix = _right_command(_extra_of(module))
    code = _refuse(f"{module} is not installed for {sys.executable}; fix: {fix}")
    sys.stderr.flush()
    os._exit(code)  # after an excepthook Python exits with 1, the code of a failed job


def _needed_modules():  # type: ignore[no-untyped-def]
    from ebbflow.core.requirements import REQUIREMENTS

    return {requirement.module for requirement in REQUIREMENTS}


def _extra_of(module):  # type: ignore[no-untyped-def]
    from ebbflow.core.requirements import REQUIREMENTS

    extras = [requirement.extra for requirement in REQUIREMENTS if requirement.module == module]
    return extras[0]


def _right_command(extra: str = "") -> str:
    """Return advice for a missing package: use the project's .venv, or install the package.

    If the package belongs to `extra`, an extra of Ebbflow, the advice names the extra.
    """
    if INSTALLED and extra:
        return f"{sys.executable} -m pip install 'ebbflow[{extra}]'"
    if INSTALLED:
        return f"{sys.executable} -m pip install ebbflow"
    python = IMPORT_ROOT / ".venv" / "bin" / "python"
    if python.exists() and Path(sys.prefix).resolve() != (IMPORT_ROOT / ".venv").resolve():
        return f"use {python}"
    return (
        f"make -C {IMPORT_ROOT} run (it sets up .venv), or: pip install -r "
        f"{IMPORT_ROOT}/requirements.txt"
    )


def _refuse(text: str) -> int:
    print(text, file=sys.stderr)
    return _PREFLIGHT_CODE
