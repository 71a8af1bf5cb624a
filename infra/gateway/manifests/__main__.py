"""Print manifests: `python -m infra.gateway.manifests split|kserve VALUES --candidate 0.1`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from infra.gateway.manifests.manifests import KSERVE, SPLIT, read_values, render
from infra.gateway.shares import Shares
from tasks.kernel.errors import ConfigurationError


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the manifests; exit code 2 for wrong input."""
    parser = argparse.ArgumentParser(prog="python -m infra.gateway.manifests", description=__doc__)
    parser.add_argument("what", choices=("split", "kserve"))
    parser.add_argument("values", type=Path)
    parser.add_argument("--candidate", type=float, default=0.0)
    parser.add_argument("--mirror", type=float, default=0.0)
    options = parser.parse_args(arguments)
    try:
        shares = Shares(candidate=options.candidate, mirror=options.mirror, sticky=False)
        template = SPLIT if options.what == "split" else KSERVE
        sys.stdout.write(render(template, read_values(options.values), shares))
    except (ConfigurationError, ValidationError) as exc:
        sys.stderr.write(f"refused: {exc}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
