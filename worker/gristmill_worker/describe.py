"""`python -m gristmill_worker.describe FOLDER`: which path runs a prepared base model, and why.

Prints one line of JSON. Reads its config alone, and loads neither weights nor torch.
"""

import argparse
import json
import sys
from pathlib import Path

from gristmill_worker.fast.shape import path_of, read_config


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 the folder has no config that can be read, 2 bad arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m gristmill_worker.describe",
        description="Tell which path of the engine runs a base model, and why.",
    )
    parser.add_argument("folder", type=Path, help="a prepared base model")
    folder: Path = parser.parse_args(arguments).folder
    try:
        path, why = path_of(read_config(folder))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{folder} has no config of a model: {error}\n")
        return 1
    sys.stdout.write(json.dumps({"path": path, "why": why}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
