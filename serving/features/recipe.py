"""How one model version's inputs are made from entity keys: what is read, and what a request gives.

Which features a model takes is never guessed: its manifest names the feature service's version and
the digest of every view's definition, and what the registry holds now is held against these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from feast import FeatureService, FeatureStore
from feast.value_type import ValueType
from pydantic import BaseModel, ConfigDict, ValidationError

from serving.features.answer import ViewUsed
from serving.features.config import EntityConfig
from tasks.contracts.data import DatasetSchema, SnapshotPins
from tasks.features.access.store import find_service
from tasks.features.access.versions import (
    DEFINITION_TAG,
    VERSION_TAG,
    published_version,
    versioned_name,
    view_digest,
)
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
        pins: exact versions; None in models of earlier releases.
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
Fingerprint = tuple[object, ...]


@dataclass(frozen=True, eq=False)
class Recipe:
    """Everything that does not depend on a request.

    Attributes:
        origin: what the version was trained with.
        columns: the model's raw inputs, in order.
        service: feature service as registered.
        views: definitions that are read, in the order of an answer.
        keys: key columns of a request.
        request_columns: inputs that no view holds and that are no keys.
        fingerprint: of the definitions; another one means that this recipe is out of date.
    """

    model: str
    version: str
    origin: ModelOrigin
    columns: DatasetSchema
    service: str
    reader: OnlineReader
    views: tuple[ViewUsed, ...]
    keys: frozenset[str]
    request_columns: tuple[str, ...]
    fingerprint: Fingerprint


def open_recipe(
    store: FeatureStore,
    model: str,
    version: str,
    origin: ModelOrigin,
    config: EntityConfig,
    online: OnlineConfig,
) -> Recipe | None:
    """Work out how a version's inputs are made; None where it was not trained on feature views.

    Raises:
        ConfigurationError: the registry lacks its feature service, or a setting is wrong.
        FeatureStoreError: definitions are others than it was trained with, and the policy is to
            refuse.
    """
    if origin.columns is None or origin.feature_service is None:
        return None
    service = service_of(store, model, version, origin, config)
    reader = OnlineReader(store, service, _policies_of(store, service, online))
    views = tuple(_used(reader.plan, origin))
    if config.definitions == "refuse":
        _refuse_others(model, version, service.name, views, origin)
    _check_columns(model, version, reader.plan, origin.columns)
    keys, stored = frozenset(reader.plan.request_columns), _outputs(reader.plan)
    columns = dict.fromkeys((*origin.columns.categorical, *origin.columns.numeric))
    return Recipe(
        model=model,
        version=version,
        origin=origin,
        columns=origin.columns,
        service=_numbered(service),
        reader=reader,
        views=views,
        keys=keys,
        request_columns=tuple(c for c in columns if c not in keys and c not in stored),
        fingerprint=fingerprint(store, service),
    )


def service_of(
    store: FeatureStore, model: str, version: str, origin: ModelOrigin, config: EntityConfig
) -> FeatureService:
    """The feature service that a version was trained with, at the version it was then.

    Models of earlier releases name no version; they read the one that readers get, and its views
    are held against the digests in the model's manifest as for any other.

    Raises:
        ConfigurationError: the registry does not hold it.
        FeatureStoreError: the version is there, and says something else than in training.
    """
    name, pins = str(origin.feature_service), origin.pins
    if pins is None:
        return find_service(store, name)
    exact = versioned_name(name, pins.service_version)
    try:
        service = find_service(store, exact)
    except ConfigurationError as exc:
        if config.definitions == "tell":
            return find_service(store, name)
        raise ConfigurationError(
            f"{model} version {version} was trained with feature service {exact}, which the "
            f"registry of project {store.project} does not hold any more. Apply the definitions of "
            "that version again, train a new model, or serve with `definitions: tell`. Entity "
            "requests for it are refused"
        ) from exc
    if service.tags.get(DEFINITION_TAG) != pins.service_definition and (
        config.definitions == "refuse"
    ):
        raise FeatureStoreError(
            f"feature service {exact} has definition {service.tags.get(DEFINITION_TAG)}, "
            f"{model} version {version} was trained with {pins.service_definition}; the registry "
            "is of another installation, or was made anew. Entity requests for it are refused"
        )
    return service


def fingerprint(store: FeatureStore, service: FeatureService) -> Fingerprint:
    """What must be equal for a recipe to be still right: service, definitions, address."""
    projections = tuple(
        (p.name, p.version_tag, tuple(f.name for f in p.features))
        for p in service.feature_view_projections
    )
    # A version's definition never changes; only who names none follows the newest.
    names = {p.name for p in service.feature_view_projections if p.version_tag is None}
    views = sorted(
        (view.name, view.current_version_number or 0, view_digest(view))
        for view in store.list_feature_views()
        if view.name in names
    )
    published = published_version(store, service.name)
    return (
        service.name,
        service.tags.get(DEFINITION_TAG),
        published.number if published else None,
        projections,
        tuple(views),
        store.config.online_store.model_dump_json(),
    )


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


def _used(plan: ReadPlan, origin: ModelOrigin) -> Iterable[ViewUsed]:
    for view in plan.views:
        digest = view_digest(view.definition)
        yield ViewUsed(
            name=view.name,
            version=view.definition.current_version_number or 0,
            definition=digest,
            is_as_trained=origin.feature_views.get(view.definition.name) == digest,
        )


def _refuse_others(
    model: str, version: str, service: str, views: tuple[ViewUsed, ...], origin: ModelOrigin
) -> None:
    if others := [view for view in views if not view.is_as_trained]:
        told = "; ".join(
            f"{v.name} is {v.definition[:12]} (version {v.version}), expected "
            f"{origin.feature_views.get(v.name, 'none')[:12]}"
            for v in others
        )
        raise FeatureStoreError(
            f"feature service {service} reads other definitions than {model} version {version} was "
            f"trained with: {told}. Promote a model of the new definitions, or serve with "
            "`definitions: tell`. Entity requests for it are refused"
        )


def _check_columns(model: str, version: str, plan: ReadPlan, columns: DatasetSchema) -> None:
    """A column of a view must be there under its name, and of a type that the model takes.

    Raises:
        FeatureStoreError: one is not.
    """
    types = {feature.output: feature.value_type for feature in plan.features}
    prefixes = {f"{view.name}__" for view in plan.views}
    wanted = (*columns.categorical, *columns.numeric)
    lost = [c for c in wanted if c not in types and c.startswith(tuple(prefixes))]
    wrong = [c for c in columns.numeric if types.get(c, ValueType.FLOAT) not in NUMBERS]
    wrong += [c for c in columns.categorical if types.get(c, ValueType.STRING) != ValueType.STRING]
    if lost or wrong:
        raise FeatureStoreError(
            f"feature service {plan.service} cannot give what {model} version {version} takes: "
            f"no column {', '.join(lost) or '(none)'}; of another type: "
            f"{', '.join(wrong) or '(none)'}. Entity requests for it are refused"
        )


def _outputs(plan: ReadPlan) -> set[str]:
    return {feature.output for feature in plan.features}


def _numbered(service: FeatureService) -> str:
    """Name with its version, also where the plain name was read."""
    number = service.tags.get(VERSION_TAG)
    is_versioned = number is None or service.name.endswith(f".v{number}")
    return str(service.name) if is_versioned else versioned_name(service.name, int(number))
