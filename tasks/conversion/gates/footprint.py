"""Memory and load time of a variant, in a process that nothing else disturbs.

The second of two copies is measured: the first one brings the runtime's libraries in, and they are
no part of the model. Memory that earlier copies gave back is returned to the system in between.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from tasks.contracts.release import BuiltVariant, RegisteredProgram
from tasks.conversion.inputs import ModelInputs
from tasks.conversion.loading import load_variant
from tasks.conversion.targets.interface import Runtime
from tasks.kernel.errors import refused_writes_explained
from tasks.kernel.scratch import scratch_folder
from tasks.kernel.settings import PROJECT_ROOT, ArtifactStore

logger = logging.getLogger(__name__)
TIMEOUT_S = 600
MODULE = "tasks.conversion.gates.footprint"
_PR_SET_PDEATHSIG = 1


class Footprint(BaseModel):
    """What one loaded copy of a variant takes."""

    model_config = ConfigDict(frozen=True)

    memory_bytes: int
    load_ms: float


class _Request(BaseModel):
    root: Path
    program: RegisteredProgram
    variants: tuple[BuiltVariant, ...]
    threads: int
    hardware_class: str
    batch: Path


def measure_footprints(
    variants: Sequence[BuiltVariant],
    program: RegisteredProgram,
    batch: ModelInputs,
    threads: int,
    hardware_class: str,
    store: ArtifactStore,
) -> dict[str, Footprint]:
    """Load each variant twice in a new process, one after the other, and measure the second copy.

    Args:
        variants: loaded by the caller before, so they do load.
        program: their source.
        batch: one call each, because runtimes take their working memory then.
        threads: of one call.
        hardware_class: what they are loaded on.
        store: holds their files.

    Returns:
        By name. A variant is missing where the process ended before it came to it; that is logged.

    Raises:
        StorageError: the disk for temporary files refused a write.
    """
    scratch = Path(tempfile.gettempdir())
    with refused_writes_explained(scratch), scratch_folder("falaj-footprint") as folder:
        file = folder / "batch.npz"
        np.savez(file, allow_pickle=False, **dict(batch))
        request = _Request(
            root=store.root,
            program=program,
            variants=tuple(variants),
            threads=threads,
            hardware_class=hardware_class,
            batch=file,
        )
        try:
            ended = subprocess.run(
                [sys.executable, "-m", MODULE],
                input=request.model_dump_json(),
                capture_output=True,
                text=True,
                cwd=PROJECT_ROOT,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            logger.warning("memory was not measured: the process took over %s s", TIMEOUT_S)
            return {}
    found = dict(_answers(ended.stdout.splitlines()))
    if len(found) < len(variants):
        last = (ended.stderr.strip().splitlines() or ["no output"])[-1]
        logger.warning(
            "memory of %d of %d variants was not measured: the process ended with %d (%s)",
            len(variants) - len(found),
            len(variants),
            ended.returncode,
            last,
        )
    return found


def _answers(lines: Iterable[str]) -> Iterable[tuple[str, Footprint]]:
    for line in lines:
        try:
            name, values = json.loads(line)
            yield name, Footprint.model_validate(values)
        except (ValueError, TypeError, ValidationError):
            continue  # a library's own line on standard output


def _resident_bytes() -> int:
    _, resident, *_ = Path("/proc/self/statm").read_text().split()
    return int(resident) * os.sysconf("SC_PAGE_SIZE")


def _give_back() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _measure(request: _Request) -> Iterable[tuple[str, Footprint]]:
    store, runtime = ArtifactStore(request.root), Runtime(request.threads, request.hardware_class)
    with np.load(request.batch) as arrays:
        batch = ModelInputs(dict(arrays))
    for variant in request.variants:
        first = load_variant(variant, request.program, runtime, store)
        first(batch)
        _give_back()
        before = _resident_bytes()
        second = load_variant(variant, request.program, runtime, store)
        second(batch)
        _give_back()
        taken = max(0, _resident_bytes() - before)
        yield variant.name, Footprint(memory_bytes=taken, load_ms=second.load_ms)
        del first, second


def main() -> None:
    """Read what to measure on standard input, write one line of JSON a variant."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # no orphan
    request = _Request.model_validate_json(sys.stdin.read())
    for name, footprint in _measure(request):
        sys.stdout.write(json.dumps([name, footprint.model_dump()]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
