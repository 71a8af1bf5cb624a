"""PyTorch program to LiteRT, in an environment that has the converter: `litert-torch`.

`python -m tasks.conversion.targets.litert_convert < order.json`; the order names the program, its
digest, the file to write, and the shapes of each signature. Nothing of the project is imported:
that environment has PyTorch and the converter only.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch


class Inference(torch.nn.Module):
    """A program by the names of its arguments. The converter looks whether a module trains."""

    def __init__(self, program: torch.export.ExportedProgram, names: list[str]) -> None:
        super().__init__()
        self.program = program.module(check_guards=False)
        self.names = names
        for module in self.modules():
            module.training = False  # a program's own module refuses `eval()`

    def forward(self, **inputs: torch.Tensor) -> Any:
        """The answers of the program."""
        return self.program(*(inputs[name] for name in self.names))


def convert(order: dict[str, Any]) -> None:
    """Write one file with a signature for each number of rows.

    Raises:
        ValueError: the program is not the one that was checked.
    """
    content = Path(order["program"]).read_bytes()
    if hashlib.sha256(content).hexdigest() != order["sha256"]:
        raise ValueError("the program is not the one that was checked")
    network = Inference(
        torch.export.load(order["program"]), [one["name"] for one in order["inputs"]]
    )
    converter = importlib.import_module("litert_torch")
    for signature, rows in order["signatures"].items():
        example = {
            one["name"]: torch.zeros([rows, *one["shape"]], dtype=getattr(torch, one["dtype"]))
            for one in order["inputs"]
        }
        converter = converter.signature(signature, network, sample_kwargs=example)
    converter.convert().export(order["written"])


if __name__ == "__main__":
    convert(json.load(sys.stdin))
