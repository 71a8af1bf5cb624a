"""How one model version's inputs are made from entity keys: what is read, and what a request gives.

Which features a model takes is never guessed: its manifest names the feature service's version and
the digest of every view's definition. What the registry holds is compared with these once: a
version of a service and of a view never changes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from feast import FeatureService, FeatureStore
from feast.value_type import ValueType
from numpy.typing import NDArray
from pydantic import Field

from serving.errors import BadRequestError, TooLargeError
from tasks.contracts.data import DatasetSchema, SnapshotPins, category_code, category_text
from tasks.features.access.store import find_service
from tasks.features.access.versions import DEFINITION_TAG, versioned_name, view_digest
from tasks.features.config import OnlineConfig
from tasks.features.online.plan import ReadPlan
from tasks.features.online.reader import OnlineReader
from tasks.imports.column_encoder import LoadedEncoder
from tasks.kernel.errors import ConfigurationError, FeatureStoreError
from tasks.kernel.settings import Settings
from tasks.registry.connection import RegistryLocation
from tasks.registry.mlflow_registry import Registry
from tasks.registry.model_folder import ModelInterface, verified_encoders, verified_manifest


class ModelOrigin(ModelInterface):
    """The part of `model.json` that reading the model's features takes.

    Attributes:
        feature_service: that the training set was made with; None for an imported program.
        feature_views: view to the digest of its definition then.
        pins: exact versions.
        encoders: column of texts or images to the folder of what encodes it.
    """

    columns: DatasetSchema | None = None
    feature_service: str | None = None
    feature_views: Mapping[str, str] = Field(default={})
    pins: SnapshotPins | None = None
    encoders: Mapping[str, Path] = Field(default={})


Origins = Callable[[str, str], ModelOrigin]
"""Model and version to what it was trained with."""


def registry_origins(settings: Settings) -> Origins:
    """Origins from the model registry, which is opened at the first question: it takes a second."""

    @cache
    def registry() -> Registry:
        return Registry(RegistryLocation.of(settings))

    def origin(model: str, version: str) -> ModelOrigin:
        found = registry().version(model, int(version))
        manifest = verified_manifest(found, ModelOrigin)
        return manifest.model_copy(update={"encoders": verified_encoders(found)})

    return origin


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
        encoders: what turns some of these into numbers: texts alone, images come as their numbers.
    """

    model: str
    version: str
    columns: DatasetSchema
    service: str
    reader: OnlineReader
    views: tuple[ViewUsed, ...]
    keys: frozenset[str]
    request_columns: tuple[str, ...]
    encoders: Mapping[str, LoadedEncoder]


def open_recipe(
    store: FeatureStore, model: str, version: str, origin: ModelOrigin, online: OnlineConfig
) -> Recipe | None:
    """Work out how a version's inputs are made; None where it was not trained on feature views.

    Raises:
        ConfigurationError: the registry lacks its feature service, or a setting is wrong.
        FeatureStoreError: definitions are others than it was trained with.
        ArtifactError: an encoder does not answer as it did when it was made.
    """
    if origin.columns is None or origin.feature_service is None:
        return None
    name = f"{model} version {version}"
    service = _service_of(store, name, origin)
    reader = OnlineReader(store, service, _policies_of(store, service, online))
    _check_columns(name, reader.plan, origin.columns)
    keys = frozenset(reader.plan.request_columns)
    stored = {feature.output for feature in reader.plan.features}
    images = {e.column: e.numbers for e in origin.columns.encoders if e.kind == "image"}
    columns = dict.fromkeys(n for c in origin.columns.given for n in images.get(c, (c,)))
    texts = {c: folder for c, folder in origin.encoders.items() if c not in images}
    return Recipe(
        model=model,
        version=version,
        columns=origin.columns,
        service=str(service.name),
        reader=reader,
        views=_views_of(name, reader.plan, origin),
        keys=keys,
        request_columns=tuple(c for c in columns if c not in keys and c not in stored),
        encoders={c: LoadedEncoder(folder, c, threads=1) for c, folder in texts.items()},
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
            "or was made again. Entity requests for it are refused"
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


def checked_columns(
    recipe: Recipe, entities: Mapping[str, Sequence[Any]], max_rows: int
) -> tuple[dict[str, list[Any]], int]:
    """Columns of a request and its rows.

    Args:
        recipe: of the version that answers.
        entities: columns of one length, texts and numbers, as the protocol has checked.
        max_rows: of one read.

    Raises:
        BadRequestError: a column is absent or unknown.
        TooLargeError: it has more rows than one read takes.
    """
    keys, expected = recipe.keys, {*recipe.keys, *recipe.request_columns}
    if missing := sorted(keys - entities.keys()):
        raise BadRequestError(
            f"the request has no key column {', '.join(missing)}; {recipe.model} is read by "
            f"{', '.join(sorted(keys))}, and the request has "
            f"{', '.join(map(str, entities)) or 'none'}. Nothing was read"
        )
    if unknown := sorted(map(str, entities.keys() - expected)):
        raise BadRequestError(
            f"the request has column {', '.join(unknown)}, which is no key of {recipe.model} and "
            f"no input that a request gives; expected {', '.join(sorted(expected))}. Nothing was "
            "read"
        )
    if lacking := [name for name in recipe.request_columns if name not in entities]:
        raise BadRequestError(
            f"the request lacks column {', '.join(lacking)}: no feature view holds these inputs of "
            f"{recipe.model}, so a request gives them beside its keys. Nothing was read"
        )
    num_rows = len(next(iter(entities.values())))
    if num_rows > max_rows:
        raise TooLargeError(
            f"the request names {num_rows} entities, expected at most {max_rows}; send fewer in "
            "one request. Nothing was read"
        )
    return {name: list(values) for name, values in entities.items()}, num_rows


_code = lru_cache(65_536)(category_code)
Column = Sequence[Any] | NDArray[Any]


def build_inputs(
    schema: DatasetSchema, columns: Mapping[str, Column], num_rows: int
) -> dict[str, NDArray[Any]]:
    """The arrays `categorical` (int32) and `numeric` (float32), rows first.

    The same numbers as of `DatasetSchema.model_inputs`, which goes through pandas: a millisecond
    for one row of a hundred columns.

    Args:
        schema: raw columns in the model's order.
        columns: by name, one entry a row; None and NaN are missing. A column that is absent is
            missing in every row.
        num_rows: of every column.

    Raises:
        BadRequestError: a value is no number where the model takes one.
    """
    codes = np.zeros((num_rows, len(schema.categorical)), np.int32)
    for position, name in enumerate(schema.categorical):
        if (values := columns.get(name)) is not None:
            codes[:, position] = [_category(value) for value in values]
    numbers = np.full((num_rows, len(schema.numeric)), np.nan, np.float32)
    for position, name in enumerate(schema.numeric):
        values = columns.get(name)
        if isinstance(values, np.ndarray):
            numbers[:, position] = values
        elif values is not None:
            numbers[:, position] = _numbers(name, values)
    return {"categorical": codes, "numeric": numbers}


def _category(value: Any) -> int:
    if type(value) is str:
        return _code(value)
    return 0 if value is None or value != value else _code(category_text(value))


def _numbers(name: str, values: Column) -> NDArray[Any]:
    try:
        plain = np.array([np.nan if value is None else value for value in values])
        if plain.dtype.kind not in "fiub":  # text would be read as a number
            raise TypeError(plain.dtype)
        with np.errstate(over="ignore"):  # beyond 32 bits is infinite, as in training
            return plain.astype(np.float32)
    except (TypeError, ValueError, OverflowError) as exc:
        bad = next((v for v in values if isinstance(v, bool | str | bytes | list | dict)), values)
        raise BadRequestError(
            f"column {name} holds {bad!r}, expected a number or null in every row. Nothing was "
            "computed"
        ) from exc
