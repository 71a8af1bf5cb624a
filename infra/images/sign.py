"""Vouch for an image: `python -m infra.images.sign registry.example.org/falaj@sha256:...`.

What is signed is the SHA-256 of the image's manifest, which holds those of its settings and layers
(OCI image specification 1.1), and so of the bill of materials in it. `falaj deploy` asks for it.
"""

import hashlib
import sys
from pathlib import Path

from tasks.governance import signing
from tasks.kernel.errors import ConfigurationError, FalajError
from tasks.kernel.settings import Settings


def _named(image: str) -> tuple[str, dict[str, str]]:
    """Subject and file of an image's signature; a tag has neither digest nor signature."""
    _, _, digest = image.partition("@sha256:")
    return f"images/{digest or image}", {"manifest.json": digest}


def sign_image(home: Path, image: str) -> None:
    """Sign the digest that a push gave an image.

    Raises:
        ConfigurationError: the image is named by a tag, which may be of another one tomorrow.
        SignatureError: the key is not among those that are trusted; nothing was written.
    """
    subject, files = _named(image)
    if len(files["manifest.json"]) != hashlib.sha256().digest_size * 2:
        raise ConfigurationError(
            f"{image!r} is no digest of an image; expected <name>@sha256:<64 digits>, as `buildah "
            "push --digestfile FILE` writes it. Nothing was signed"
        )
    signing.sign(home, subject, files)


def check_image(home: Path, image: str) -> None:
    """See that an image was signed; without `FALAJ_TRUSTED_KEYS` one that never was counts too.

    Raises:
        SignatureError: nobody signed it, or nobody who is trusted.
    """
    signing.check_record(home, *_named(image))


if __name__ == "__main__":
    try:
        sign_image(Settings.from_environment().home, " ".join(sys.argv[1:]))
    except FalajError as exc:
        sys.exit(f"refused: {exc}")
