"""A rank program that writes down how it finds itself, then ends in the way it is told to.

`describe.json` in the run directory holds, for each rank, the way: `end`, `raise`, `exit 7`,
`leave a child`, or `sleep`.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import torch

from tasks.kernel.files import write_atomically
from tasks.training.strategies.communicators import HorovodCommunicator

WAYS_FILE = "describe.json"


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0])
    ranks = HorovodCommunicator()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.randn(600, 600) @ torch.ones(600, 1)  # a parallel operator, which a bad fork hangs in
    description = {
        "environment": dict(os.environ),
        "arguments": sys.argv[1:],
        "folder": str(Path.cwd()),
        # What this process had open before Horovod and PyTorch opened their own.
        "descriptors": [(n, os.readlink(f"/proc/self/fd/{n}")) for n in range(3)],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "leads_its_session": os.getsid(0) == os.getpid(),
        "threads": torch.get_num_threads(),
        "sum": ranks.sum(np.array([ranks.rank + 1.0])).tolist(),
    }
    write_atomically(folder / f"rank-is-{ranks.rank}", json.dumps(description))
    write_atomically(folder / f"pid-{ranks.rank}", str(os.getpid()))
    end(json.loads((folder / WAYS_FILE).read_text())[ranks.rank], ranks)


def end(way: str, ranks: HorovodCommunicator) -> None:
    sys.stdout.write(f"about to {way}\n")
    if way == "raise":
        raise ValueError("on purpose")
    if way == "exit 7":
        sys.exit(7)
    if way == "leave a child":
        subprocess.Popen(["sleep", "300"])
    if way == "sleep":
        threading.Event().wait()
    ranks.shut_down()


if __name__ == "__main__":
    main(sys.argv[1:])
