"""Every format that a program can be converted into: what it is, not how it is built.

This module is cheap to import: the configuration is checked against it. How each file format is
built and loaded is in the module of its name, see `targets/interface.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tasks.contracts.hardware import kind_of
from tasks.kernel.errors import ConfigurationError


@dataclass(frozen=True)
class Format:
    """A file format and a precision."""

    file_format: str
    precision: str
    hardware: tuple[str, ...]
    """Kinds of machine it is built for: it is timed, and may be accepted, on these alone."""
    made_from: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    """Packages whose version decides the files."""
    settings: tuple[str, ...] = ()
    """Fields of `ConversionConfig` that decide the files."""

    @property
    def name(self) -> str:
        """As in `onnx-fp32`."""
        return f"{self.file_format}-{self.precision}"

    @property
    def needs_calibration(self) -> bool:
        """Whether it is built with rows that show it the range of its values."""
        return "calibration_rows" in self.settings

    def is_for(self, hardware_class: str) -> bool:
        """Whether it is built for machines of this class; `cpu-arm` is a `cpu`."""
        return kind_of(hardware_class) in self.hardware


CPU, GPU, ANY = ("cpu",), ("gpu",), ("cpu", "gpu")
ONNX, OPENVINO, NNCF = ("onnx", "onnxruntime"), ("openvino",), ("openvino", "nncf")
CALIBRATED, ENGINE = ("calibration_rows",), ("batch_sizes",)

# From simple to complex: each is compared with, and made from, earlier ones only.
FORMATS = (
    Format("onnx", "fp32", ANY, packages=("torch", "onnx", "onnxscript")),
    Format("openvino", "fp32", CPU, ("onnx-fp32",), OPENVINO),
    # The file holds 32-bit weights; OpenVINO rounds them when it loads it.
    Format("openvino", "bf16", CPU, ("onnx-fp32",), OPENVINO),
    Format("onnx", "int8", ANY, ("onnx-fp32",), ONNX, CALIBRATED),
    Format("openvino", "int8", CPU, ("openvino-fp32",), NNCF, CALIBRATED),
    Format("onnx", "fp16", GPU, ("onnx-fp32",), ONNX),
    Format("tensorrt", "fp16", GPU, ("onnx-fp16",), settings=ENGINE),
    Format("tensorrt", "int8", GPU, ("onnx-int8",), settings=ENGINE),
)
FORMAT = {one.name: one for one in FORMATS}
PRECISIONS = tuple(dict.fromkeys(one.precision for one in FORMATS))


def format_of(name: str) -> Format:
    """The format of a name.

    Raises:
        ConfigurationError: there is none.
    """
    if name not in FORMAT:
        raise ConfigurationError(f"there is no format {name!r}; there are {', '.join(FORMAT)}")
    return FORMAT[name]


def with_sources(names: Iterable[str]) -> tuple[Format, ...]:
    """These formats and all that they are made from, each after what it is made from."""
    needed = set(names)
    for one in reversed(FORMATS):
        if one.name in needed:
            needed.update(one.made_from)
    return tuple(one for one in FORMATS if one.name in needed)
