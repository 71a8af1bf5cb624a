"""Versions of feature views and services, kept by Feast's registry itself.

Feast numbers the versions of a view and keeps each definition (`weather@v0:temp` reads an old
one), but by itself it makes a version only where fields or entities changed. A changed TTL or
source would have no version, and whoever reads by version would never get it. So a view whose
definition changed in any way that decides values is applied with the next number, and the digest of
the definition travels as a tag of the view, and so into Feast's history.

Feast has no versions of services, and one that does not say which version of a view it reads goes
on reading the first one's values online. So each version of a service is a service of its own,
`<name>.v<number>`, whose views are pinned. The plain name is the version that readers get; it moves
when the values of the new one are online (`publish_services`), so no reader sees an empty view.
"""

import copy
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from feast import FeatureService, FeatureStore, FeatureView
from feast.errors import FeastObjectNotFoundException
from feast.feature_view_projection import FeatureViewProjection

from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import content_key

logger = logging.getLogger(__name__)

DEFINITION_TAG = "falaj.definition"
VERSION_TAG = "falaj.version"
_VERSIONED_NAME = re.compile(r"(?P<name>.+)\.v(?P<number>\d+)")


@dataclass(frozen=True)
class ServiceVersion:
    """One version of a feature service; `views` says which version of each view it reads."""

    name: str
    number: int
    digest: str
    views: dict[str, int]

    @property
    def registered_name(self) -> str:
        """Name under which Feast knows this version."""
        return versioned_name(self.name, self.number)


def versioned_name(service: str, number: int) -> str:
    """Name of the Feast service that is this version."""
    return f"{service}.v{number}"


def view_definition(view: FeatureView) -> dict[str, object]:
    """Everything of a declared view that decides its values."""
    source = view.batch_source
    transformation = getattr(view, "feature_transformation", None)
    return {
        "entities": sorted(view.entities),
        "fields": sorted([f.name, str(f.dtype)] for f in view.features),
        "ttl_s": view.ttl.total_seconds() if view.ttl else 0,
        "source": [type(source).__name__, getattr(source, "path", None) or source.name],
        "times": [source.timestamp_field, source.created_timestamp_column],
        "mapping": dict(source.field_mapping),
        "code": transformation.to_proto().SerializeToString().hex() if transformation else None,
    }


def view_digest(view: FeatureView) -> str:
    """Digest of a view's definition: the tag where it was applied, else computed."""
    return str(view.tags.get(DEFINITION_TAG) or content_key(view_definition(view)))


def number_views(feast: FeatureStore, views: Iterable[FeatureView]) -> None:
    """Give every declared view the number of its version: the active one, or the next.

    Call it before `apply`; the numbers are then Feast's own.
    """
    active = {view.name: view for view in feast.list_feature_views()}
    for view in views:
        digest = content_key(view_definition(view))
        known = active.get(view.name)
        view.tags = {**view.tags, DEFINITION_TAG: digest}
        if known is not None and known.tags.get(DEFINITION_TAG) == digest:
            # Not by its number: Feast would put back the description of the day it was made.
            view.current_version_number = known.current_version_number or 0
        else:
            number = 1 + max(view_versions(feast, view.name), default=-1)
            view.version = f"v{number}"
            logger.info("feature view %s: version %d is new", view.name, number)


def view_versions(feast: FeatureStore, name: str) -> list[int]:
    """Numbers of all versions of a view that Feast holds, oldest first."""
    try:
        return [int(v["version_number"]) for v in feast.list_feature_view_versions(name)]
    except FeastObjectNotFoundException:
        return []


def apply_service_versions(feast: FeatureStore, services: Sequence[FeatureService]) -> None:
    """Register the version of each service whose content is not the newest one's.

    Call it after the views were applied. A plain name that is not there yet is registered too; one
    that is there stays where it is until `publish_services`.

    Raises:
        ConfigurationError: a service names a view that is not applied.
    """
    views = {view.name: view for view in feast.list_feature_views()}
    registered = {service.name for service in feast.list_feature_services()}
    made = []
    for service in services:
        if _VERSIONED_NAME.fullmatch(service.name):
            raise ConfigurationError(
                f"feature service {service.name!r} ends like a version; names of that form are "
                "given to versions of a service. Choose another name. It was not applied"
            )
        pinned = _pinned(service, views)
        newest = newest_version(feast, service.name)
        if newest is None or newest.digest != pinned.tags[DEFINITION_TAG]:
            number = 1 + (newest.number if newest else 0)
            made.append(_renamed(pinned, versioned_name(service.name, number), number))
            logger.info("feature service %s: version %d is new", service.name, number)
            if service.name not in registered:
                made.append(_renamed(pinned, service.name, number))
    if made:
        feast.apply(made)


def publish_services(feast: FeatureStore) -> None:
    """Let every plain name lead to the newest version; its values must be online by now."""
    moved = []
    plain = {each.name: each.tags.get(VERSION_TAG) for each in feast.list_feature_services()}
    for version in _kept_versions(feast):
        is_newest = version == newest_version(feast, version.name)
        if is_newest and plain.get(version.name) != str(version.number):
            service = feast.get_feature_service(version.registered_name)
            moved.append(_renamed(service, version.name, version.number))
            logger.info("feature service %s: readers get version %d", version.name, version.number)
    if moved:
        feast.apply(moved)


def service_versions(feast: FeatureStore, name: str) -> list[ServiceVersion]:
    """All kept versions of a service, oldest first."""
    found = [version for version in _kept_versions(feast) if version.name == name]
    return sorted(found, key=lambda version: version.number)


def _kept_versions(feast: FeatureStore) -> list[ServiceVersion]:
    """All versions of all services."""
    return [version for version in map(_read, feast.list_feature_services()) if version]


def newest_version(feast: FeatureStore, name: str) -> ServiceVersion | None:
    """The newest version of a service, None where it has none."""
    return next(reversed(service_versions(feast, name)), None)


def is_kept(feast: FeatureStore, registered: object) -> bool:
    """True for what must stay registered though no module declares it any more.

    These are versions of services, and the views that one of them reads.
    """
    if isinstance(registered, FeatureService):
        return _VERSIONED_NAME.fullmatch(registered.name) is not None
    if isinstance(registered, FeatureView):
        return any(registered.name in version.views for version in _kept_versions(feast))
    return False


def _pinned(service: FeatureService, views: dict[str, FeatureView]) -> FeatureService:
    """A copy whose views carry their numbers, with the digest of its content as a tag."""
    projections = []
    for projection in service.feature_view_projections:
        if projection.name not in views:
            raise ConfigurationError(
                f"feature service {service.name} reads feature view {projection.name}, which is "
                "not defined; define it in the feature repository. The service was not applied"
            )
        pinned = copy.copy(projection)
        if pinned.version_tag is None:
            pinned.version_tag = views[projection.name].current_version_number or 0
        projections.append(pinned)
    copied = copy.copy(service)
    copied.feature_view_projections = projections
    content = [_projection_content(p, views[p.name]) for p in projections]
    copied.tags = {**service.tags, DEFINITION_TAG: content_key(content)}
    return copied


def _projection_content(projection: FeatureViewProjection, view: FeatureView) -> list[object]:
    features = [f"{f.name}:{f.dtype}" for f in projection.features]
    named = [projection.name, projection.name_alias, sorted(projection.join_key_map.items())]
    return [*named, features, projection.version_tag, view_digest(view)]


def _renamed(service: FeatureService, name: str, number: int) -> FeatureService:
    renamed = copy.copy(service)
    renamed.name = name
    renamed.tags = {**service.tags, VERSION_TAG: str(number)}
    renamed._features = []  # its projections say it all; Feast would infer them again from these
    return renamed


def _read(service: FeatureService) -> ServiceVersion | None:
    """The version that a registered service is, None for a plain name."""
    match = _VERSIONED_NAME.fullmatch(service.name)
    if match is None:
        return None
    return ServiceVersion(
        name=match["name"],
        number=int(match["number"]),
        digest=service.tags.get(DEFINITION_TAG, ""),
        views={p.name: p.version_tag or 0 for p in service.feature_view_projections},
    )
