"""Opening a registered version: its variants with digests and stamps checked, and golden answers.

A version is ready when at least one kind of hardware has a form of it that gives the golden
answers; what is missing for the others is told, never passed over.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from serving.engine.backends import PLATFORMS, Backend, Circuit
from serving.engine.config import EngineConfig, HardwareConfig, ServedModel
from serving.engine.golden import Golden, gap, golden_batch
from serving.engine.versions import LoadedVersion, VersionKey
from tasks.contracts.base import Artifact
from tasks.contracts.conversion import tabular_signature
from tasks.contracts.release import ModelVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.kinds.registry import bound_of, kind_of
from tasks.conversion.loading import open_variant
from tasks.conversion.targets.interface import LoadedModel, Runtime
from tasks.kernel.errors import FalajError, RegistryError
from tasks.kernel.files import size_of
from tasks.registry.mlflow_registry import RegisteredVersion
from tasks.registry.model_folder import read_version, verified_program
from tasks.registry.records import RegisteredVariant


@dataclass(frozen=True)
class Choice:
    """A variant and why it is that one; without a variant, why there is none."""

    reason: str
    entry: RegisteredVariant | None = None


def choose_variant(entries: Sequence[RegisteredVariant], hardware: HardwareConfig) -> Choice:
    """The variant of a version that serves on this hardware."""
    kept = [
        entry
        for entry in entries
        if entry.folder is not None and entry.variant.hardware_class == hardware.hardware_class
    ]
    if not kept:
        classes = sorted({e.variant.hardware_class for e in entries if e.folder is not None})
        return Choice(
            f"no variant was kept for hardware class {hardware.hardware_class!r} (there are some "
            f"for {', '.join(classes) or 'none'}); convert the version for it"
        )
    if hardware.variants:
        return _named(kept, hardware)
    for entry in kept:
        if hardware.goal in entry.variant.serves:
            return Choice(f"chosen for the goal {hardware.goal!r}", entry)
    timed = [entry for entry in kept if entry.variant.latencies]
    if timed:
        least = min(timed, key=lambda entry: _latency(entry.variant))
        return Choice(f"no goal {hardware.goal!r}; least recorded latency of small calls", least)
    return Choice(f"no goal {hardware.goal!r} and nothing measured; the simplest", kept[0])


def _named(kept: list[RegisteredVariant], hardware: HardwareConfig) -> Choice:
    by_name = {entry.variant.name: entry for entry in kept}
    for name in hardware.variants:
        if name in by_name:
            return Choice("named by the configuration", by_name[name])
    return Choice(
        f"the configuration asks for {', '.join(hardware.variants)} on {hardware.name!r}, kept are "
        f"{', '.join(by_name)}; name one of these, or convert again"
    )


def _latency(variant: ModelVariant) -> float:
    return min(variant.latencies, key=lambda at: at.batch_rows).p50_ms


logger = logging.getLogger(__name__)
PROGRAM_VARIANT = "pytorch-program"


@dataclass(frozen=True)
class _Opening:
    """A version that is being opened."""

    version: RegisteredVersion
    program: RegisteredProgram
    path: Path
    golden: Golden
    model: ServedModel
    config: EngineConfig


def open_version(
    version: RegisteredVersion, key: VersionKey, config: EngineConfig, folder: Path
) -> LoadedVersion:
    """Load and check everything that may answer for a version.

    Args:
        version: as the registry knows it.
        key: of what is returned.
        config: hardware, bounds, and whether PyTorch may answer.
        folder: keeps golden batches.

    Raises:
        FalajError: nothing of it can answer as recorded; says why for each kind of hardware.
    """
    path, program = _program_of(version)
    models = {model.name: model for model in config.models}
    model = models.get(version.name, ServedModel(name=version.name))
    golden = golden_batch(program, path, folder, model.golden_rows)
    opening = _Opening(version, program, path, golden, model, config)
    entries = _entries_of(version)
    backends: list[Backend] = []
    troubles: list[str] = []
    for hardware in config.hardware:
        try:
            backends.append(_open_on(hardware, entries, opening))
        except (FalajError, OSError) as exc:
            troubles.append(f"{hardware.name}: {exc}")
            logger.warning("%s cannot be served on %s: %s", version, hardware.name, exc)
    if not backends and config.program == "last_resort":
        logger.warning("%s is served by its program in PyTorch: %s", version, "; ".join(troubles))
        backends.append(_open_program(config.hardware[0], opening))
    if not backends:
        raise RegistryError(f"{version} cannot be served. {'; '.join(troubles)}")
    return LoadedVersion(key, program.signature, tuple(backends), tuple(troubles))


def _program_of(version: RegisteredVersion) -> tuple[Path, RegisteredProgram]:
    path, interface = verified_program(version)
    signature = interface.signature
    if signature is None:
        if interface.columns is None:
            raise RegistryError(
                f"{version} says neither its columns nor its tensors, so nothing can call it; "
                "register it again"
            )
        signature = tabular_signature(interface.columns)
    ref = version.ref
    return path, RegisteredProgram(
        version=ref,
        program=Artifact(
            uri=f"registry:{path.name}", sha256=ref.program_sha256, num_bytes=size_of(path)
        ),
        columns=interface.columns,
        family=interface.family,
        signature=signature,
    )


def _entries_of(version: RegisteredVersion) -> tuple[RegisteredVariant, ...]:
    record = read_version(version)
    if record.variants is not None:
        return record.variants.variants
    for sentence in record.damage:
        logger.warning("%s: %s", version, sentence)
    return ()


def _open_on(
    hardware: HardwareConfig, entries: tuple[RegisteredVariant, ...], opening: _Opening
) -> Backend:
    choice = choose_variant(entries, hardware)
    if choice.entry is None or choice.entry.folder is None:
        raise RegistryError(choice.reason)
    variant = choice.entry.variant
    runtime = Runtime(hardware.threads, hardware.hardware_class)
    loaded = open_variant(
        opening.version.folder / choice.entry.folder, variant, opening.program, runtime
    )
    _check_answers(loaded, variant, opening)
    logger.info(
        "%s: %s serves on %s (%s)", opening.version, variant.name, hardware.name, choice.reason
    )
    return _backend(hardware, variant.name, PLATFORMS.get(variant.format, ""), loaded, opening)


def _check_answers(loaded: LoadedModel, variant: ModelVariant, opening: _Opening) -> None:
    """Compare golden answers within the bound that the variant was kept by.

    Raises:
        RegistryError: they are farther apart.
        ConversionError: the variant cannot answer them.
    """
    bound = opening.model.bounds.get(variant.precision)
    if bound is None:
        program = opening.program
        of_family = bound_of(kind_of(program), variant.precision, ConversionConfig())
        bound = max(of_family.max_gap, of_family.edge_gap or 0.0, variant.parity_max or 0.0)
    seen = gap(opening.golden, loaded, opening.program)
    if seen > bound:
        raise RegistryError(
            f"{variant.name} answers the golden batch {seen:.3g} from the registered program, "
            f"within {bound:.3g} is recorded; it does not serve. Convert the version again, or "
            "name rows that are like its data as golden_rows of the model"
        )


def _open_program(hardware: HardwareConfig, opening: _Opening) -> Backend:
    from tasks.conversion.targets.pytorch import load_pytorch

    loaded = load_pytorch(opening.path, opening.program.signature, Runtime(hardware.threads))
    return _backend(hardware, PROGRAM_VARIANT, PLATFORMS["pytorch"], loaded, opening)


def _backend(
    hardware: HardwareConfig, variant: str, platform: str, loaded: LoadedModel, opening: _Opening
) -> Backend:
    placement = opening.config.placement
    backend = Backend(
        hardware=hardware.name,
        variant=variant,
        platform=platform,
        score=loaded.score,
        signature=opening.program.signature,
        probe=opening.golden.probe,
        settings=loaded.settings,
        circuit=Circuit(placement.open_s, placement.most_open_s),
    )
    backend.measure([opening.golden.probe, *opening.golden.calls])
    return backend
