"""The whole exception tree: what went wrong, and whether trying again can help.

Every message says what was seen, what was expected, which thing it concerns and what to do next or
what was left undone. Library exceptions are turned into these at a room's edge.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar


class FalajError(Exception):
    """Base of all errors raised on purpose; its text is meant for the person who runs the flow."""

    code: ClassVar[str] = "F000"
    """Names the kind of error in messages and in `docs/reference/errors.md`; never changes."""


class TransientError(FalajError):
    """Something outside failed and may work when tried again; the only kind that is retried."""

    code = "F100"


class ConfigurationError(FalajError):
    """A setting, configuration value or feature repository is wrong; retrying cannot help."""

    code = "F200"


class NotRunningError(ConfigurationError):
    """What a command needs does not run: the platform, a server, the UI."""

    code = "F210"


class AccessError(ConfigurationError):
    """Whoever acts is not signed in, or may not do this."""

    code = "F240"


class LostKeyError(ConfigurationError):
    """A key that is needed is gone, or another one encrypted what is to be read."""

    code = "F220"


class PlacementRefusedError(FalajError):
    """A law, or a rule of residency, refuses to have data in a place, or cannot answer."""

    code = "F230"


class DataContractError(FalajError):
    """Data breaks what was promised about it: columns, types, keys, times, expectations."""

    code = "F300"


class WindowError(DataContractError):
    """A time window is reversed, empty, without a time zone, or ends in the future."""

    code = "F310"


class FeatureStoreError(FalajError):
    """The feature store refused, lost or duplicated rows, or lacks what was asked for."""

    code = "F400"


class StaleFeaturesError(FeatureStoreError):
    """An online read met values too old or absent, and its policy is to refuse them."""

    code = "F410"


class ArtifactError(FalajError):
    """A stored artifact is missing, or its content does not match its digest."""

    code = "F500"


class SignatureError(ArtifactError):
    """A signature is missing, is of other content, or of a key that is not trusted."""

    code = "F520"


class StorageError(FalajError):
    """The disk or store refused a write; nothing half written was left visible."""

    code = "F510"


class TrainingError(FalajError):
    """A training run failed for a reason that will fail again."""

    code = "F600"


class ConversionError(FalajError):
    """A model could not be converted for one target."""

    code = "F610"


class ConversionParityError(ConversionError):
    """A converted model does not answer like the model it was made from."""

    code = "F611"


class RegistryError(FalajError):
    """The model registry lacks a version, an alias or a proof, or refused a change."""

    code = "F700"


class PromotionRefusedError(RegistryError):
    """A gate is closed; the alias was not moved."""

    code = "F710"


class StageError(FalajError):
    """A stage that was sent to a work pool gave no result: nobody took it, or it was cancelled."""

    code = "F800"


class StageLostError(TransientError):
    """The run of a stage was cut off from outside; its finished steps are kept."""

    code = "F110"


class LeaseError(FalajError):
    """Devices of this host could not be had in the time that was given."""

    code = "F810"


_PERMANENT_WRITE_ERRORS = {errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES, errno.EPERM}
_NO_SUCH_PLACE = {errno.ENOENT, errno.ENOTDIR, errno.EEXIST}


@contextmanager
def refused_writes_explained(target: Path) -> Iterator[None]:
    """Turn an operating-system refusal to write under `target` into a `StorageError` sentence."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in _PERMANENT_WRITE_ERRORS and not _cannot_be_made(target, exc):
            raise
        raise StorageError(
            f"{target}: the disk refused a write ({exc.strerror}); expected a writable folder with "
            "free space. Nothing half written is visible; free space or mend the permissions and "
            "run again, finished stages are kept"
        ) from exc


def _cannot_be_made(target: Path, exc: OSError) -> bool:
    """True where `target` or a folder above it is a file, or lies where nothing can be made.

    The same error about any other path is one of reading, and passes on as it is.
    """
    if exc.errno not in _NO_SUCH_PLACE or not isinstance(exc.filename, str | os.PathLike):
        return False
    return target.is_relative_to(Path(exc.filename))
