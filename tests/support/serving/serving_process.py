"""A serving process with the small engine of the tests; run as a module, with its arguments.

`FALAJ_TEST_DELAY_S` makes every answer so much later; `FALAJ_TEST_EMPTY` starts with nothing
registered.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

from serving.__main__ import main
from serving.assembly import Components, ComponentsOf
from serving.config import ServingConfig
from serving.errors import BadRequestError, FeaturesRefusedError
from serving.interfaces import num_rows_of
from tasks.kernel.settings import Settings
from tests.support.serving.inline_engine import InlineEngine


class TableReader:
    """Features of three aircraft; the fourth has none."""

    def __init__(self) -> None:
        self.rows = {"N1": (1.0, 2.0, 3.0), "N2": (4.0, 5.0, 6.0), "N3": (7.0, 8.0, 9.0)}

    def keys_of(self, model: str) -> frozenset[str] | None:
        return frozenset({"tailnum", "day"})

    async def resolve(self, model, entities, version=None, track="stable"):  # type: ignore[no-untyped-def]
        import numpy as np

        if set(entities) != {"tailnum", "day"}:
            raise BadRequestError(f"expected tailnum and day, seen {sorted(entities)}")
        unknown = [name for name in entities["tailnum"] if name not in self.rows]
        if unknown:
            raise FeaturesRefusedError(f"nothing is known of {unknown}")
        numeric = np.array([self.rows[name] for name in entities["tailnum"]], np.float32)
        days = np.array(entities["day"], np.int32)
        inputs = {"categorical": np.stack([days, days], axis=1), "numeric": numeric}
        return inputs, SimpleNamespace(report=lambda: {"rows": num_rows_of(inputs)})


def components_of(settings: Settings) -> ComponentsOf:
    def made(config: ServingConfig, home: Path) -> Components:
        stable: str | None = None if "FALAJ_TEST_EMPTY" in os.environ else "1"
        engine = InlineEngine(version=stable)
        engine.delay_s = float(os.environ.get("FALAJ_TEST_DELAY_S", "0"))
        pages = {"/metrics": lambda: ("text/plain", b"calls %d\n" % engine.num_answered)}
        return Components(engine, entities=TableReader(), pages=pages)

    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], components_of))
