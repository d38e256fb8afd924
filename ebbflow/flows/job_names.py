"""Readable names for jobs that the user did not name, such as "laptop-brave-otter"."""

import random
import re
import secrets
from pathlib import Path

from ebbflow.core.errors import InfraError
from ebbflow.core.layout import job_prefix, launcher_key, plain_name
from ebbflow.core.store import Store

_ADJECTIVES = (
    "amber brave brisk calm clear coral crisp dapper eager early fair fleet fond gentle golden "
    "happy hardy jolly keen kind light lively lucky mellow merry mild neat noble proud quick quiet "
    "rapid ready royal sharp shiny silver smart snowy solid steady sunny swift tidy vivid warm wise"
)
_ANIMALS = (
    "badger beaver bison cobra condor crane dingo dolphin eagle egret falcon ferret finch gecko "
    "gull heron ibex jackal jaguar koala lark lemur lynx marmot marten mole moose newt orca osprey "
    "otter owl panda parrot pelican plover puffin quail raven robin seal shrew stork swan tapir "
    "tern tiger toad turtle viper walrus weasel whale wolf wren zebra"
)
_TRIES = 20
_REQUEST_SECONDS = 5.0


def new_job_name(path: str, store: str) -> str:
    """Return a name that no job in the store has.

    If the store does not answer, the name ends with a random number instead.

    Args:
        path: path of the configuration file or script, whose name begins the job's; "" without
            one.
        store: URI of the store.
    """
    stem = re.sub(r"^\W+", "", plain_name(Path(path).stem)) or "job"
    draw = random.SystemRandom()
    try:
        root = Store.open(store, request_timeout_seconds=_REQUEST_SECONDS)
        for _ in range(_TRIES):
            name = f"{stem}-{draw.choice(_ADJECTIVES.split())}-{draw.choice(_ANIMALS.split())}"
            # Every launcher's first act is this claim, so no job without it has this name
            if root.sub(job_prefix(name)).head(launcher_key(1)) is None:
                return name
    except InfraError:
        pass  # the launcher's quick checks name the store's trouble
    return f"{stem}-{draw.choice(_ADJECTIVES.split())}-{secrets.token_hex(4)}"
