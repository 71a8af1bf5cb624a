"""Fill a small disk with checkpoints: `python -m ... FOLDER`, in a mount namespace of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tasks.kernel.errors import StorageError
from tasks.training.checkpoints.store import MANIFEST_NAME
from tasks.training.checkpoints.writer import CheckpointWriter
from tests.support.training.checkpoint_writer import state_of, store_at

DISK = "size=4m"


def main(folder: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", folder], check=True)
    store = store_at([folder])
    refused, epoch = "", 0
    while not refused:
        epoch += 1
        try:
            with CheckpointWriter(store, 60, asynchronous=True, num_kept=100) as writer:
                writer.save(epoch, 0, state_of(epoch))
        except StorageError as exc:
            refused = str(exc)
    newest = store.newest()
    assert newest
    whole = {path.parent for path in Path(folder).glob(f"*/{MANIFEST_NAME}")}
    left = [path for path in Path(folder).rglob("state.pt*") if path.parent not in whole]
    store.prune(1)
    store.save(epoch, 0, state_of(epoch))  # there is space again
    seen = {
        "refused": refused,
        "epoch": epoch,
        "newest": newest.epoch,
        "loaded": store.load(newest)["history"][0],
        "leftovers": list(map(str, left)),
    }
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
