"""All targets for processors of a small model, built and judged in a process of its own.

    python -m tests.support.conversion.judged {network|encoder} FOLDER

What was decided is written to `FOLDER/variants.json`.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import TypeAdapter

from tasks.contracts.release import ModelVariant
from tasks.conversion.convert import judge_variants
from tasks.conversion.targets.catalog import FORMATS
from tasks.conversion.targets.interface import ConversionJob
from tasks.kernel.settings import PROJECT_ROOT, ArtifactStore
from tests.support.conversion.programs import QUICK, SmallNetwork, built, tabular_job, with_formats
from tests.support.data import encoders

FOR_PROCESSORS = tuple(
    target.name
    for target in FORMATS
    if target.file_format in ("onnx", "openvino") and target.is_for("cpu")
)
Variants = TypeAdapter(tuple[ModelVariant, ...])


def network(store: ArtifactStore) -> ConversionJob:
    """A small network for tables, and the rows that judge it."""
    return tabular_job(store, SmallNetwork())


def encoder(store: ArtifactStore) -> ConversionJob:
    """A small encoder of texts, and the texts that judge it."""
    program = encoders.registered(store, "encoder")
    return ConversionJob(program, encoders.prepared(store), QUICK, store)


MODELS: dict[str, Callable[[ArtifactStore], ConversionJob]]
MODELS = {"network": network, "encoder": encoder}


def judged_by_a_process(
    model: str,
    folder: Path,
    environment: dict[str, str] | None = None,
    inside: Callable[[list[str]], list[str]] = list,
) -> dict[str, ModelVariant]:
    """What a process of its own decides of each target.

    Args:
        model: a name in `MODELS`.
        folder: new, for everything that it writes.
        environment: what it has beside this process's own.
        inside: makes the command one that runs elsewhere, such as in a control group.
    """
    folder.mkdir()
    command = inside([sys.executable, "-m", __name__, model, str(folder)])
    told = {**os.environ, **(environment or {})}
    done = subprocess.run(command, env=told, cwd=PROJECT_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    variants = Variants.validate_json((folder / "variants.json").read_bytes())
    return {variant.name: variant for variant in variants}


def main(model: str, folder: str) -> None:
    """Build and judge all targets of one model."""
    job = with_formats(MODELS[model](ArtifactStore(Path(folder) / "artifacts")), *FOR_PROCESSORS)
    variants = judge_variants(job, built(job))
    (Path(folder) / "variants.json").write_bytes(Variants.dump_json(variants))


if __name__ == "__main__":
    main(*sys.argv[1:])
