"""Bills of materials in CycloneDX 1.6: of the environment, and of a model.

A bill names what a thing was made of, each part with its digest. It holds no random number, so the
same content gives the same bytes, and its own digest can be kept and signed.

Source: CycloneDX 1.6 (ECMA-424), with its component `machine-learning-model` and the model card.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from importlib.metadata import PackageMetadata, distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from packaging.utils import canonicalize_name

from tasks.kernel.files import digest_of, digest_of_all
from tasks.kernel.settings import PROJECT_ROOT

if TYPE_CHECKING:
    from cyclonedx.model.component import Component

LOCK = PROJECT_ROOT / "infra" / "requirements.lock"
CODE = ("falaj", "flows", "infra", "serving", "tasks")
CHOSEN = {"text-unidecode": "Artistic License", "sigstore-models": "MIT"}
"""Licences of packages whose metadata offer several, or none."""
BILLS = uuid.UUID("1d0f3a52-6f1c-5d0b-9a3e-2f2d6c0f4b18")
"""Name space of the serial numbers; never to be changed."""


@dataclass(frozen=True)
class Part:
    """One thing that another was made of, or consists of."""

    kind: Literal["application", "data", "file", "library", "machine-learning-model"]
    name: str
    sha256: str | None = None
    """Of a folder as of `tasks.kernel.files.digest_of`; of a library that of its `RECORD`, which
    holds the digest of each file that was installed."""
    version: str | None = None
    licence: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def ref(self) -> str:
        """Its name inside the bill."""
        return f"{self.name}@{self.version or (self.sha256 or '')[:12]}"


def licence_of(package: PackageMetadata) -> str:
    """A package's licence in one line, as its metadata have it; empty where they have none."""
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in package.get_all("Classifier") or ()
        if line.startswith("License ::") and not line.endswith("OSI Approved")
    ]
    expressions, texts = (package.get_all(n) or () for n in ("License-Expression", "License"))
    lines = (str(text).strip().partition("\n")[0] for text in texts)
    found = (CHOSEN.get(package["Name"]), *expressions, ", ".join(classifiers), *lines)
    return next(filter(None, found), "")


@cache
def environment_bill() -> str:
    """The bill of this process's environment: Falaj's code, and all packages beside it.

    The lock says what may be installed, with the digests of the archives; it is named by its own.
    """
    parts: dict[str, Part] = {}
    for package in distributions():
        metadata = package.metadata  # parsed anew each time it is asked for
        name, version = str(canonicalize_name(metadata["Name"])), metadata["Version"]
        installed = hashlib.sha256((package.read_text("RECORD") or "").encode()).hexdigest()
        # Of two of one name the first is imported.
        parts.setdefault(name, Part("library", name, installed, version, licence_of(metadata)))
    own = parts.pop("falaj")  # of a checkout its RECORD names no module, so these are hashed
    files = sorted(f for name in CODE for f in (PROJECT_ROOT / name).rglob("*.py"))
    code = digest_of_all((f.relative_to(PROJECT_ROOT).as_posix(), digest_of(f)) for f in files)
    facts = {"requirements.lock": digest_of(LOCK)} if LOCK.exists() else {}
    return bill(Part("application", "falaj", code, own.version, own.licence, facts), parts.values())


def bill(
    product: Part,
    parts: Iterable[Part],
    *,
    parents: Iterable[Part] = (),
    made: datetime | None = None,
    card: Mapping[str, Any] | None = None,
) -> str:
    """The bill of one thing as JSON, names in order.

    Args:
        product: what it is of.
        parts: what it consists of, and was made of.
        parents: what it descends from.
        made: when; a bill of no moment has none.
        card: `modelCard` of the specification, of a model.
    """
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.component import Pedigree
    from cyclonedx.output.json import JsonV1Dot6

    own, components = _component(product), [*map(_component, parts)]
    own.pedigree = Pedigree(ancestors=map(_component, parents))
    bom = Bom(components=components, metadata=BomMetaData(component=own))
    bom.register_dependency(own, components)
    document = json.loads(JsonV1Dot6(bom).output_as_string())
    del document["serialNumber"], document["metadata"]["timestamp"]  # random, and now
    if made is not None:
        document["metadata"]["timestamp"] = made.isoformat()
    if card is not None:  # the library has no class for it yet
        document["metadata"]["component"]["modelCard"] = card
    content = json.dumps(document, sort_keys=True)
    document["serialNumber"] = f"urn:uuid:{uuid.uuid5(BILLS, content)}"
    return json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n"


def digests_in(file: Path, kind: str) -> dict[str, str]:
    """SHA-256 of each part of a kind to its name, as a bill has them."""
    parts = json.loads(file.read_text(encoding="utf-8"))["components"]
    return {part["hashes"][0]["content"]: part["name"] for part in parts if part["type"] == kind}


def _component(part: Part) -> Component:
    from cyclonedx.contrib.license.factories import LicenseFactory
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    sha256, licence = HashAlgorithm.SHA_256, part.licence
    return Component(
        type=ComponentType(part.kind),
        name=part.name,
        version=part.version,
        bom_ref=part.ref,
        purl=PackageURL("pypi", None, part.name, part.version) if part.kind == "library" else None,
        licenses=[LicenseFactory().make_from_string(licence)] if licence else (),
        hashes=[HashType(alg=sha256, content=part.sha256)] if part.sha256 else (),
        properties=[Property(name=f"falaj:{n}", value=text) for n, text in part.facts.items()],
    )
