"""From the registry to versions that may answer: digests checked, and golden answers.

Everything here may wait for a disk or a database, and is called on the loader's thread. A version
is ready when at least one kind of hardware has a variant of it that gives the golden answers; what
is missing for the others is reported, never passed over.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from serving.config import EngineConfig, HardwareConfig, ServedModel
from serving.engine.golden import Golden, gap, golden_batch
from serving.engine.versions import PLATFORMS, Backend, LoadedVersion, VersionKey
from serving.errors import NotReadyError, UnknownModelError
from tasks.contracts.release import RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.kinds.interface import bound_of, kind_of
from tasks.conversion.targets.interface import Runtime
from tasks.conversion.variants import open_variant
from tasks.kernel.errors import FalajError, RegistryError
from tasks.kernel.files import file_state
from tasks.registry.connection import RegistryLocation
from tasks.registry.mlflow_registry import PROGRAM_TAG, VARIANTS_TAG, RegisteredVersion, Registry
from tasks.registry.model_folder import RegisteredVariant, read_version, verified_program

logger = logging.getLogger(__name__)


GOLDEN_FOLDER = Path("serving") / "golden"


class RegistryCatalogue:
    """Versions of the model registry.

    Args:
        location: of the registry; a database that does not exist is not created.
        home: state folder; golden batches are kept under `serving/golden`.
        config: hardware.
        models: how versions of a model are checked.
    """

    def __init__(
        self,
        location: RegistryLocation,
        home: Path,
        config: EngineConfig,
        models: Sequence[ServedModel],
    ) -> None:
        self._location = location
        self._golden = home / GOLDEN_FOLDER
        self._config = config
        self._models = {model.name: model for model in models}
        self._opened: Registry | None = None
        self._seen: tuple[object, ...] | None = None

    def by_alias(self, model: str, alias: str) -> VersionKey | None:
        """The version that an alias names; None where there is no such alias or model.

        Raises:
            NotReadyError: the registry is away.
        """
        with _not_ready(f"alias {alias!r} of {model} cannot be read: "):
            registry = self._registry()
            found = None if registry is None else registry.by_alias(model, alias)
        return None if found is None else _key(found)

    def by_number(self, model: str, version: str) -> VersionKey:
        """A version by its number.

        Raises:
            UnknownModelError: there is no such version.
            NotReadyError: the registry is away.
        """
        return _key(self._found(model, version))

    def open(self, key: VersionKey) -> LoadedVersion:
        """Load a version and check it.

        Raises:
            UnknownModelError: it is gone.
            NotReadyError: its files, its stamp or its golden batch are not as recorded.
        """
        found = self._found(key.model, key.version)
        model = self._models.get(key.model) or ServedModel(name=key.model)
        with _not_ready():
            try:
                return open_version(found, model, self._config, self._golden)
            except OSError as exc:
                raise RegistryError(f"{found}: its files cannot be read ({exc})") from exc

    def has_changed(self) -> bool:
        """Whether the database's files changed; of a database server always."""
        path = self._location.database_path
        if path is None:
            return True
        seen = tuple(file_state(Path(f"{path}{suffix}")) for suffix in ("", "-wal", "-journal"))
        changed = seen != self._seen
        self._seen = seen
        return changed

    def _found(self, model: str, version: str) -> RegisteredVersion:
        with _not_ready(f"versions of {model} cannot be read: "):
            registry = self._registry()
            versions = [] if registry is None else registry.versions(model)
        for one in versions:
            if str(one.number) == version:
                return one
        known = ", ".join(str(one.number) for one in versions[-8:]) or "none"
        raise UnknownModelError(
            f"the registry has no version {version!r} of {model!r}; it has {known}"
        )

    def _registry(self) -> Registry | None:
        """The registry; None while its database does not exist."""
        path = self._location.database_path
        if self._opened is None and (path is None or path.exists()):
            self._opened = Registry(self._location)
        return self._opened


@contextmanager
def _not_ready(what: str = "") -> Iterator[None]:
    """Turn what keeps a version from being loaded into the refusal that clients get."""
    try:
        yield
    except FalajError as exc:
        raise NotReadyError(f"{what}{exc}") from exc


def _key(version: RegisteredVersion) -> VersionKey:
    tags = (version.tags.get(PROGRAM_TAG, ""), version.tags.get(VARIANTS_TAG, ""))
    return VersionKey(version.name, str(version.number), ":".join(tags))


def choose_variant(
    entries: Sequence[RegisteredVariant], hardware: HardwareConfig
) -> tuple[RegisteredVariant, str]:
    """The variant of a version that serves on this hardware, and why it is that one.

    Raises:
        RegistryError: there is none.
    """
    kept = [entry for entry in entries if entry.folder is not None]
    fitting = [e for e in kept if e.variant.hardware_class == hardware.hardware_class]
    if not fitting:
        classes = ", ".join(sorted({e.variant.hardware_class for e in kept})) or "none"
        raise RegistryError(
            f"no variant was kept for hardware class {hardware.hardware_class!r} (there are some "
            f"for {classes}); convert the version for it"
        )
    by_name = {entry.variant.name: entry for entry in fitting}
    if hardware.variants:
        for name in hardware.variants:
            if name in by_name:
                return by_name[name], "named by the configuration"
        raise RegistryError(
            f"the configuration asks for {', '.join(hardware.variants)} on {hardware.name!r}, kept "
            f"are {', '.join(by_name)}; name one of these, or convert again"
        )
    for entry in fitting:
        if hardware.goal in entry.variant.serves:
            return entry, f"chosen for the goal {hardware.goal!r}"
    return fitting[0], f"no goal {hardware.goal!r}; the simplest"


def open_version(
    version: RegisteredVersion, model: ServedModel, config: EngineConfig, folder: Path
) -> LoadedVersion:
    """Load and check everything that may answer for a version.

    Args:
        version: as the registry knows it.
        model: how it is checked.
        config: hardware.
        folder: keeps golden batches.

    Raises:
        FalajError: nothing of it can answer as recorded; says why for each kind of hardware.
    """
    path, program = verified_program(version)
    golden = golden_batch(program, path, folder, model.golden_rows)
    record = read_version(version)
    entries = () if record.variants is None else record.variants.variants
    backends: list[Backend] = []
    troubles = [] if entries else list(record.damage)
    for hardware in config.hardware:
        try:
            backends.append(_open_on(hardware, entries, version, program, golden))
        except (FalajError, OSError) as exc:
            troubles.append(f"{hardware.name}: {exc}")
            logger.warning("%s cannot be served on %s: %s", version, hardware.name, exc)
    if not backends:
        raise RegistryError(f"{version} cannot be served. {'; '.join(troubles)}")
    return LoadedVersion(_key(version), program.signature, tuple(backends), tuple(troubles))


def _open_on(
    hardware: HardwareConfig,
    entries: tuple[RegisteredVariant, ...],
    version: RegisteredVersion,
    program: RegisteredProgram,
    golden: Golden,
) -> Backend:
    """The variant for a kind of hardware, once it gives the golden answers.

    Their gap may be that which conversion allows for the precision, or was recorded.

    Raises:
        FalajError: there is no variant, or it does not answer as recorded.
    """
    entry, reason = choose_variant(entries, hardware)
    assert entry.folder is not None
    variant = entry.variant
    runtime = Runtime(hardware.threads, hardware.hardware_class)
    loaded = open_variant(version.folder / entry.folder, variant, program, runtime)
    of_kind = bound_of(kind_of(program), variant.precision, ConversionConfig())
    bound = max(of_kind.max_gap, of_kind.edge_gap or 0.0, variant.parity_max or 0.0)
    seen = gap(golden, loaded, program)
    if seen > bound:
        raise RegistryError(
            f"{variant.name} answers the golden batch {seen:.3g} from the registered program, "
            f"within {bound:.3g} is recorded; it does not serve. Convert the version again, or "
            "name rows that are like its data as golden_rows of the model"
        )
    logger.info("%s: %s serves on %s (%s)", version, variant.name, hardware.name, reason)
    platform = PLATFORMS.get(variant.format, "")
    backend = Backend(hardware.name, variant.name, platform, loaded.score, golden.probe)
    backend.measure([golden.probe, *golden.calls])
    return backend
