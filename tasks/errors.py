"""The whole exception tree: what went wrong, and whether trying again can help.

Every message says what was seen, what was expected, which thing it concerns and what to do next or
what was left undone. Library exceptions are turned into these at a room's edge.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FalajError(Exception):
    """Base of all errors raised on purpose; its text is meant for the person who runs the flow."""


class TransientError(FalajError):
    """Something outside failed and may work when tried again; the only kind that is retried."""


class ConfigurationError(FalajError):
    """A setting, configuration value or feature repository is wrong; retrying cannot help."""


class DataContractError(FalajError):
    """Data breaks what was promised about it: columns, types, keys, times, expectations."""


class WindowError(DataContractError):
    """A time window is reversed, empty, without a time zone, or ends in the future."""


class FeatureStoreError(FalajError):
    """The feature store refused, lost or duplicated rows, or lacks what was asked for."""


class StaleFeaturesError(FeatureStoreError):
    """An online read met values too old or absent, and its policy is to refuse them."""


class ArtifactError(FalajError):
    """A stored artifact is missing, or its content does not match its digest."""


class StorageError(FalajError):
    """The disk or store refused a write; nothing half written was left visible."""


class TrainingError(FalajError):
    """A training run failed for a reason that will fail again."""


class ConversionError(FalajError):
    """A model could not be converted for one target."""


class ConversionParityError(ConversionError):
    """A converted model does not answer like the model it was made from."""


class RegistryError(FalajError):
    """The model registry lacks a version, an alias or a proof, or refused a change."""


class PromotionRefusedError(RegistryError):
    """A gate is closed; the alias was not moved."""


_PERMANENT_WRITE_ERRORS = {errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES, errno.EPERM}


@contextmanager
def refused_writes_explained(target: Path) -> Iterator[None]:
    """Turn an operating-system refusal to write under `target` into a `StorageError` sentence."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in _PERMANENT_WRITE_ERRORS:
            raise
        raise StorageError(
            f"{target}: the disk refused a write ({exc.strerror}); expected a writable folder with "
            "free space. Nothing half written is visible; free space or mend the permissions and "
            "run again, finished stages are kept"
        ) from exc
