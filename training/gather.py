"""``python -m nodekit.training.gather FOLDER OUT.pt``: write the weights of the newest snapshot to a plain file."""

import argparse
import sys
from pathlib import Path

from nodekit.training.errors import log_to_stderr
from nodekit.training.snapshots.files import shards
from nodekit.training.snapshots.files.commit import place, written_beside
from nodekit.training.snapshots.files.manifest import save_payload
from nodekit.training.snapshots.snapshot import Snapshots

_NAME = "python -m nodekit.training.gather"


def main() -> int:
    """Write the file, and return the exit status, 0 or 1."""
    parser = argparse.ArgumentParser(
        prog=_NAME,
        description="Write the weights of the newest good snapshot, whole or sharded, into one file: a plain state "
        "dict, for torch.load(weights_only=True) or --init-from. No GPU or process group is needed.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="with the snapshots, as runs/ID/snapshots"
    )
    parser.add_argument("out", type=Path, metavar="OUT.pt", help="not there yet")
    given = parser.parse_args()
    log_to_stderr()
    try:
        if given.out.exists():
            raise FileExistsError(f"{given.out} is there already: remove it, or name another file")
        found = Snapshots(given.folder, leave_shards=True).load()
        if found is None:
            raise FileNotFoundError(
                f"no good snapshot in {given.folder}: name the folder with the g*-s*.json files"
            )
        state = shards.weights(found.state, found.shards) if found.shards else found.state["model"]
        with written_beside(given.out.parent) as (temporary, file):
            stream = save_payload(state, file)
            place(temporary, file, given.out.name)
    except (OSError, KeyError, TypeError) as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        return 1
    print(
        f"{given.out}: {len(state)} tensors in {stream.size_bytes:,} bytes, of step {found.manifest.step} "
        f"(generation {found.manifest.generation}), from {found.source}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
