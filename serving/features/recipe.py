"""How one model version's inputs are made from entity keys: what is read, and what a request gives.

Which features a model takes is never guessed: its manifest names the feature service's version and
the digest of every view's definition. What the registry holds is compared with these once: a
version of a service and of a view never changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from feast import FeatureService, FeatureStore
from feast.value_type import ValueType
from pydantic import BaseModel, ConfigDict, ValidationError

from tasks.contracts.data import DatasetSchema, SnapshotPins
from tasks.features.access.store import find_service
from tasks.features.access.versions import DEFINITION_TAG, versioned_name, view_digest
from tasks.features.config import OnlineConfig
from tasks.features.online.plan import ReadPlan
from tasks.features.online.reader import OnlineReader
from tasks.kernel.errors import ConfigurationError, FeatureStoreError, RegistryError
from tasks.kernel.files import digest_of
from tasks.kernel.settings import Settings
from tasks.registry.connection import RegistryLocation
from tasks.registry.mlflow_registry import MANIFEST_TAG, Registry
from tasks.registry.model_folder import MANIFEST_FILE


class ModelOrigin(BaseModel):
    """The part of `model.json` that reading the model's features takes.

    Attributes:
        columns: raw inputs in their order; None for a program that takes no table.
        feature_service: that the training set was made with; None for an imported program.
        feature_views: view to the digest of its definition then.
        pins: exact versions.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    columns: DatasetSchema | None = None
    feature_service: str | None = None
    feature_views: dict[str, str] = {}
    pins: SnapshotPins | None = None


class RegistryOrigins:
    """Origins of model versions from the registry, each checked by digest.

    Opened at the first question; opening takes a second. Questions are asked by one thread.
    """

    def __init__(self, settings: Settings) -> None:
        self._location = RegistryLocation.of(settings)
        self._registry: Registry | None = None

    def __call__(self, model: str, version: str) -> ModelOrigin:
        """What one version was trained with.

        Raises:
            RegistryError: there is no such version, or its manifest is missing or damaged.
            TransientError: the registry is away.
        """
        self._registry = self._registry or Registry(self._location)
        registered = self._registry.version(model, int(version))
        file = registered.folder / MANIFEST_FILE
        expected = registered.tags.get(MANIFEST_TAG)
        if not file.exists() or digest_of(file) != expected:
            raise RegistryError(
                f"{MANIFEST_FILE} of {registered} is missing or not what the registry's digest "
                f"says (in {registered.folder}), so nothing tells which features it takes. Restore "
                "the folder from a backup; entity requests for it are refused"
            )
        try:
            return ModelOrigin.model_validate_json(file.read_text(encoding="utf-8"))
        except ValidationError as exc:
            raise RegistryError(
                f"{MANIFEST_FILE} of {registered} is not what this code writes: {exc}. Entity "
                "requests for it are refused"
            ) from exc


NUMBERS = (ValueType.FLOAT, ValueType.DOUBLE, ValueType.INT32, ValueType.INT64, ValueType.BOOL)


@dataclass(frozen=True, slots=True)
class ViewUsed:
    """One feature view as a model version reads it.

    Attributes:
        version: Feast's number of the definition that is read.
        definition: digest of that definition, which is the one of training.
    """

    name: str
    version: int
    definition: str


@dataclass(frozen=True, eq=False)
class Recipe:
    """Everything that does not depend on a request.

    Attributes:
        columns: the model's raw inputs, in order.
        service: feature service as registered, version included.
        views: definitions that are read, in the order of an answer.
        keys: key columns of a request.
        request_columns: inputs that no view holds and that are no keys.
    """

    model: str
    version: str
    columns: DatasetSchema
    service: str
    reader: OnlineReader
    views: tuple[ViewUsed, ...]
    keys: frozenset[str]
    request_columns: tuple[str, ...]


def open_recipe(
    store: FeatureStore, model: str, version: str, origin: ModelOrigin, online: OnlineConfig
) -> Recipe | None:
    """Work out how a version's inputs are made; None where it was not trained on feature views.

    Raises:
        ConfigurationError: the registry lacks its feature service, or a setting is wrong.
        FeatureStoreError: definitions are others than it was trained with.
    """
    if origin.columns is None or origin.feature_service is None:
        return None
    name = f"{model} version {version}"
    service = _service_of(store, name, origin)
    reader = OnlineReader(store, service, _policies_of(store, service, online))
    _check_columns(name, reader.plan, origin.columns)
    keys = frozenset(reader.plan.request_columns)
    stored = {feature.output for feature in reader.plan.features}
    columns = dict.fromkeys((*origin.columns.categorical, *origin.columns.numeric))
    return Recipe(
        model=model,
        version=version,
        columns=origin.columns,
        service=str(service.name),
        reader=reader,
        views=_views_of(name, reader.plan, origin),
        keys=keys,
        request_columns=tuple(c for c in columns if c not in keys and c not in stored),
    )


def _service_of(store: FeatureStore, model: str, origin: ModelOrigin) -> FeatureService:
    """The feature service that a version was trained with, at the version it was then.

    Raises:
        ConfigurationError: the registry does not hold it.
        FeatureStoreError: the version is there, and says something else than in training.
    """
    pins = origin.pins
    if pins is None:
        raise FeatureStoreError(
            f"{model} does not say which version of feature service {origin.feature_service} it "
            "was trained with; train it again. Entity requests for it are refused"
        )
    exact = versioned_name(str(origin.feature_service), pins.service_version)
    try:
        service = find_service(store, exact)
    except ConfigurationError as exc:
        raise ConfigurationError(
            f"{model} was trained with feature service {exact}, which the registry of project "
            f"{store.project} does not hold any more. Apply the definitions of that version again, "
            "or train a new model. Entity requests for it are refused"
        ) from exc
    if service.tags.get(DEFINITION_TAG) != pins.service_definition:
        raise FeatureStoreError(
            f"feature service {exact} has definition {service.tags.get(DEFINITION_TAG)}, {model} "
            f"was trained with {pins.service_definition}; the registry is of another installation, "
            "or was made anew. Entity requests for it are refused"
        )
    return service


def _policies_of(
    store: FeatureStore, service: FeatureService, online: OnlineConfig
) -> OnlineConfig:
    """Policies of the views that the service reads; an older one may lack a view of today.

    Raises:
        ConfigurationError: a policy names a view that does not exist at all.
    """
    read = {p.name_alias or p.name for p in service.feature_view_projections}
    known = {view.name for view in store.list_feature_views()} | read
    if unknown := sorted(online.view_policies.keys() - known):
        raise ConfigurationError(
            f"features.online.view_policies names {', '.join(unknown)}, which project "
            f"{store.project} does not define; it has {', '.join(sorted(known))}"
        )
    policies = {name: policy for name, policy in online.view_policies.items() if name in read}
    return online.model_copy(update={"view_policies": policies})


def _views_of(model: str, plan: ReadPlan, origin: ModelOrigin) -> tuple[ViewUsed, ...]:
    """Definitions that are read.

    Raises:
        FeatureStoreError: one is not that of training.
    """
    used = []
    for view in plan.views:
        number, digest = view.definition.current_version_number or 0, view_digest(view.definition)
        expected = origin.feature_views.get(view.definition.name, "none")
        if digest != expected:
            raise FeatureStoreError(
                f"feature service {plan.service} reads another definition than {model} was trained "
                f"with: {view.name} is {digest[:12]} (version {number}), expected {expected[:12]}. "
                "Promote a model of the new definitions. Entity requests for it are refused"
            )
        used.append(ViewUsed(view.name, number, digest))
    return tuple(used)


def _check_columns(model: str, plan: ReadPlan, columns: DatasetSchema) -> None:
    """A column of a view must be there under its name, and of a type that the model takes.

    Raises:
        FeatureStoreError: one is not.
    """
    types = {feature.output: feature.value_type for feature in plan.features}
    prefixes = tuple({f"{view.name}__" for view in plan.views})
    wanted = (*columns.categorical, *columns.numeric)
    lost = [c for c in wanted if c not in types and c.startswith(prefixes)]
    wrong = [c for c in columns.numeric if types.get(c, ValueType.FLOAT) not in NUMBERS]
    wrong += [c for c in columns.categorical if types.get(c, ValueType.STRING) != ValueType.STRING]
    if lost or wrong:
        raise FeatureStoreError(
            f"feature service {plan.service} cannot give what {model} takes: no column "
            f"{', '.join(lost) or '(none)'}; of another type: {', '.join(wrong) or '(none)'}. "
            "Entity requests for it are refused"
        )
