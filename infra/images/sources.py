"""Where packages come from on this machine, as options for `buildah build`, one a line.

Images are built with the sources that pip and apt of this machine have; none of them stays in an
image: pip's settings are a secret of one step, local folders are mounted while steps run.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from infra.provision.machine import package_sources


def options(folder: Path) -> Iterator[str]:
    """Options of one build.

    Args:
        folder: what is mounted is written here; it lives as long as the build.
    """
    line = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(line, check=True, capture_output=True, text=True).stdout
    sources = package_sources(listing)
    if "cert" in sources:
        yield f"--secret=id=ca,src={sources['cert']}"
        sources["cert"] = "/run/secrets/ca"
    settings = "".join(f"{name} = {value}\n" for name, value in sources.items())
    (folder / "pip.conf").write_text(f"[global]\n{settings}", encoding="utf-8")
    yield f"--secret=id=pip,src={folder / 'pip.conf'}"
    for path in sorted(set(local_paths(" ".join(sources.values()).split()))):
        yield f"--volume={path}:{path}:ro"


def local_paths(places: Sequence[str]) -> Iterator[Path]:
    """Those places that are on this machine; of an index what it links to, `../files`, as well."""
    for place in places:
        path = Path(urlsplit(place).path).parent if place.startswith("file:") else Path(place)
        if path.is_absolute() and path.exists():
            yield path


if __name__ == "__main__":
    print("\n".join(options(Path(sys.argv[1]))))
