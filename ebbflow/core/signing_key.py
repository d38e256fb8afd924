"""Check of the environment variable that holds the key for signing commits.

The key is secret: it is read only where it is used, and is never in a configuration, argument,
event or stored object.
"""

import os
import re

# Names the variable with the key, for this process and its children. Unset: commits are not signed.
NAME_VARIABLE = "EBBFLOW_SIGNING_KEY_ENV"
SHORTEST_KEY_BYTES = 16
NAME_PATTERN = re.compile(r"[A-Z_][A-Z0-9_]{0,99}")  # a secret given by mistake rarely matches


def signing_key_problem(name: str) -> str:
    """Return why the environment variable `name` holds no usable signing key; "" if it holds
    one.
    """
    variable = f"the environment variable {name} (checkpoint.signing_key_env)"
    length = len(os.fsencode(os.environ.get(name, "")))
    if not length:
        return f"{variable} is not set or empty"
    if length < SHORTEST_KEY_BYTES:
        return f"{variable} has {length} bytes, at least {SHORTEST_KEY_BYTES} are needed"
    return ""
