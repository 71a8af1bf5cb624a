"""Command line: `python -m infra.work_pools` writes the base job templates anew."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from infra.work_pools.templates import TEMPLATES


def main() -> int:
    """Write each template beside this module."""
    for name, make in TEMPLATES.items():
        path = Path(__file__).with_name(name.split("/")[0]) / name.split("/")[1]
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(make(), indent=2) + "\n", encoding="utf-8")
        print(path.relative_to(Path(__file__).parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
