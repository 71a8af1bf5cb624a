"""Sign an image that was pushed: `python -m infra.images.sign NAME@sha256:DIGEST`.

The digest is of the manifest in the registry of images, as `buildah push --digestfile` tells it;
the local one is of other bytes. `falaj deploy --pools kubernetes` asks for the signature where
`FALAJ_TRUSTED_KEYS` is set. A cluster's own admission (Sigstore's policy controller, Kyverno) knows
nothing of it: for that, sign with `cosign` as well.
"""

import sys

from tasks.governance.signing import sign as sign_digest
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import Settings


def sign(image: str) -> None:
    """Sign the manifest of an image.

    Raises:
        ConfigurationError: it is named by no digest.
    """
    _, mark, digest = image.partition("@sha256:")
    if not mark or len(digest) != 64:
        raise ConfigurationError(f"{image} is no NAME@sha256:DIGEST. Nothing was signed")
    sign_digest(Settings.from_environment().home, f"images/{digest}", {"manifest.json": digest})


if __name__ == "__main__":
    sign(sys.argv[1])
