"""Random placements, judged by the policies and by a table that was written without them."""

import random
from pathlib import Path
from typing import get_args

import pytest
import yaml

from tasks.governance.handling import DataClass, Handling, Placement
from tasks.governance.policy import Basis, Policies
from tasks.kernel.settings import Settings

HOMES = ("uae", "uae-dubai", "uae-difc", "uae-adgm", "eu", "eu-de", "fr", "no", "gb", "us", "sa")
ZONES = (*HOMES, "ca", "jp", "br", "in", "unknown")
SAFEGUARDS = {*"standard-contractual-clauses binding-corporate-rules code-of-conduct".split()}
SAFEGUARDS |= {"certification", "public-authority-instrument"}
CONSENTS = {"contract", "express-consent"}
SPECIAL = {"explicit-consent", "health-care"}
PART = {("us", "data-privacy-framework-participant"), ("ca", "commercial-organisation")}
OTHERS = {*CONSENTS, *SPECIAL, *(name for _, name in PART), "owner-decision", "derogation"}
BASES = sorted(SAFEGUARDS | OTHERS)
EUROPE = {"eu", "eu-de", "fr", "no"}
EMIRATES = {"uae", "uae-dubai", "uae-difc", "uae-adgm"}
LAW = {
    **dict.fromkeys(("uae", "uae-dubai"), "pdpl"),
    **dict.fromkeys(EUROPE, "gdpr"),
    "uae-difc": "difc",
    "uae-adgm": "adgm",
}
FREE = {
    "pdpl": EMIRATES,
    "gdpr": EUROPE | {"gb", "jp", "br"},
    "difc": EUROPE | {"uae-difc"},
    "adgm": EUROPE | {"uae-adgm", "gb", "jp"},
}
"""Zones to which personal data of a law goes without anything on file."""
ON_FILE = {"pdpl": CONSENTS, **dict.fromkeys(("gdpr", "difc", "adgm"), SAFEGUARDS)}
INSIDE = {(zone, zone) for zone in HOMES} | {("eu-de", "eu")}
INSIDE |= {(zone, "uae") for zone in EMIRATES}


def may(home: str, zone: str, basis: str) -> bool:
    """Whether personal data of a home may be in a zone that is known, with this on file."""
    law = LAW.get(home, "")
    is_free = bool(law) and (zone in FREE[law] or basis in ON_FILE[law])
    return is_free or (zone, home) in INSIDE or (law == "gdpr" and (zone, basis) in PART)


def expected(handling: Handling, zone: str, bases: list[Basis]) -> bool:
    return all(_of_home(handling, home, zone, bases) for home in handling.homes)


def _of_home(handling: Handling, home: str, zone: str, bases: list[Basis]) -> bool:
    kind, law = handling.data_class, LAW.get(home, "")
    mine = [basis for basis in bases if basis.home == home]
    on_file = ["nothing", *(basis.basis for basis in mine if basis.zone == zone)]
    if zone == "unknown":
        return False
    if kind == "public":
        return True
    if kind == "internal":
        return (zone, home) in INSIDE or "owner-decision" in on_file
    if law and handling.purpose not in handling.purposes:
        return False
    if (kind, law) == ("sensitive", "gdpr") and not SPECIAL & {basis.basis for basis in mine}:
        return False
    return any(may(home, zone, basis) for basis in on_file)


@pytest.mark.parametrize(
    "number", [500, pytest.param(10_000, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_random_placements_agree_with_an_independent_table(tmp_path: Path, number: int) -> None:
    draw = random.Random(number)
    settings = Settings(tmp_path / "home", tmp_path / "project")
    zones = {f"{zone}.example.org": zone for zone in ZONES if zone != "unknown"}
    (tmp_path / "project" / "policies").mkdir(parents=True)
    (tmp_path / "project" / "policies" / "policy.yaml").write_text(yaml.safe_dump({"zones": zones}))
    policies, seen = Policies(settings), {True: 0, False: 0}
    for _ in range(number):
        homes = tuple(sorted(draw.sample(HOMES, draw.choice((1, 1, 1, 2)))))
        zone = draw.choice((*ZONES, *homes, *homes))
        known = zone if zone != "unknown" else "jp"
        to, on_file = draw.choice((known, known, "in")), {"document": "x", "until": policies.today}
        bases = [
            Basis(home=draw.choice(homes), zone=to, basis=draw.choice(BASES), **on_file)
            for _ in range(draw.choice((0, 1, 1, 2, 3)))
        ]
        handling = Handling(
            data_class=draw.choice(get_args(DataClass)),
            homes=homes,
            purposes=("care", "research"),
            purpose=draw.choice(("care", "care", "care", "advertising")),
        )
        policies.file = policies.file.model_copy(update={"bases": tuple(bases)})
        found = policies.decide(Placement("model", f"https://{zone}.example.org"), handling)
        assert found.zone == zone
        assert found.allowed == expected(handling, zone, bases), str(found)
        seen[found.allowed] += 1
    assert min(seen.values()) > number / 5
