"""Makes the golden curve anew: `python -m tests.support.golden`, from the project's root.

To be run when model, optimizer, data order or text change on purpose, and for no other reason; the
difference of the losses then belongs into the commit's message.
"""

from __future__ import annotations

import json
import platform
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import torch

from tests.support.curves import GOLDEN, REFERENCE, VARIANTS, make_config, train_curves


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        curve = train_curves(Path(folder), [REFERENCE])[REFERENCE]
    config = make_config(VARIANTS[REFERENCE], "store").model_dump(mode="json")
    made = {
        "made_by": "python -m tests.support.golden",
        "made_at": datetime.now(UTC).strftime("%Y-%m-%d"),
        "made_with": f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}",
        "text": "tests/text",
        "model": config["model"],
        "training": config["training"],
        "losses": curve.losses,
        "held_out": curve.held_out,
    }
    GOLDEN.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
