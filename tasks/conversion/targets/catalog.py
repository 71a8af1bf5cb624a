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

    name: str
    file_format: str
    precision: str
    hardware: tuple[str, ...]
    """Kinds of machine it is built for: it is timed, and may be accepted, on these alone."""
    made_from: tuple[str, ...] = ()
    needs_calibration: bool = False
    settings: tuple[str, ...] = ()
    """Fields of `ConversionConfig` that decide the files."""
    packages: tuple[str, ...] = ()
    """Packages whose version decides the files."""

    def is_for(self, hardware_class: str) -> bool:
        """Whether it is built for machines of this class; `cpu-arm` is a `cpu`."""
        return kind_of(hardware_class) in self.hardware


_CALIBRATED = ("calibration_rows",)
_ENGINE = ("batch_sizes",)

# From simple to complex: each is compared with, and made from, earlier ones only.
FORMATS = (
    Format(
        *("onnx-fp32", "onnx", "fp32", ("cpu", "gpu")), packages=("torch", "onnx", "onnxscript")
    ),
    Format(
        *("openvino-fp32", "openvino", "fp32", ("cpu",)),
        made_from=("onnx-fp32",),
        packages=("openvino",),
    ),
    # The file holds 32-bit weights; OpenVINO rounds them when it loads it.
    Format(
        *("openvino-bf16", "openvino", "bf16", ("cpu",)),
        made_from=("onnx-fp32",),
        packages=("openvino",),
    ),
    Format(
        *("onnx-int8", "onnx", "int8", ("cpu", "gpu")),
        made_from=("onnx-fp32",),
        needs_calibration=True,
        settings=_CALIBRATED,
        packages=("onnx", "onnxruntime"),
    ),
    Format(
        *("openvino-int8", "openvino", "int8", ("cpu",)),
        made_from=("openvino-fp32",),
        needs_calibration=True,
        settings=_CALIBRATED,
        packages=("openvino", "nncf"),
    ),
    Format(
        *("onnx-fp16", "onnx", "fp16", ("gpu",)),
        made_from=("onnx-fp32",),
        packages=("onnx", "onnxruntime"),
    ),
    Format(
        *("tensorrt-fp16", "tensorrt", "fp16", ("gpu",)), made_from=("onnx-fp16",), settings=_ENGINE
    ),
    Format(
        *("tensorrt-int8", "tensorrt", "int8", ("gpu",)), made_from=("onnx-int8",), settings=_ENGINE
    ),
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
