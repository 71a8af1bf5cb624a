"""A `torch.export` program: opened without letting it run code, checked, and run in PyTorch."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.export import ExportedProgram

from tasks.contracts.conversion import Signature, open_program
from tasks.conversion.targets.interface import Array, Float32Array, LoadedModel, Runtime, loaded
from tasks.kernel.errors import ArtifactError, ConversionError


def load_program(path: Path) -> ExportedProgram:
    """Read a `.pt2` file.

    Raises:
        ArtifactError: it is no program archive, holds pickled objects, or gives several tensors.
    """
    program = open_program(path)
    outputs = program.graph_signature.user_outputs
    if len(outputs) != 1:
        raise ArtifactError(
            f"the program of {path.name} gives {len(outputs)} tensors, expected one: a model has "
            "one answer, with an axis for its parts. Export one that gives them joined"
        )
    return program


def check_program(program: ExportedProgram, signature: Signature) -> None:
    """Refuse a program that does not take the inputs of the signature.

    Raises:
        ConversionError: other names, order, types, widths, or an axis that is fixed.
    """
    values = {n.name: n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"}
    taken = list(program.graph_signature.user_inputs)
    if taken != (names := [spec.name for spec in signature.inputs]):
        raise ConversionError(
            f"the program takes inputs {taken}, expected {names} in this order; export it with "
            "these argument names, tensors alone"
        )
    seen = [
        (name, str(values[name].dtype).removeprefix("torch."), _axes(values[name].shape))
        for name in program.graph_signature.user_inputs
    ]
    expected = [(spec.name, spec.dtype, _axes(spec.shape)) for spec in signature.inputs]
    if seen != expected:
        raise ConversionError(
            f"the program takes {seen}, its signature says {expected} (name, type, axes). They "
            "belong to different models, or an axis was fixed where it was exported"
        )


def _axes(shape: Iterable[object]) -> list[object]:
    return [axis if isinstance(axis, int) else "any" for axis in shape]


def load_pytorch(path: Path, signature: Signature, runtime: Runtime) -> LoadedModel:
    """Load a program as it was exported, on the CPU.

    The number of threads is a setting of the whole process; see `torch_threads_restored`.

    Raises:
        ConversionError: PyTorch runs with other settings.
        ArtifactError: the file is damaged.
    """
    start = time.perf_counter()
    torch.set_num_threads(runtime.threads)
    module = load_program(path).module(check_guards=False)
    # Range checks of the export would double the time of a small batch; plain eager has none.
    module._forward_pre_hooks.clear()

    def score(arrays: dict[str, Array]) -> Float32Array:
        with torch.inference_mode():
            tensors = [
                torch.from_numpy(values if values.flags.writeable else values.copy())
                for values in arrays.values()
            ]
            scores: Float32Array = module(*tensors).numpy()
        return scores

    settings = {
        "runtime": f"pytorch {torch.__version__}",
        "threads": str(torch.get_num_threads()),
        "precision": torch.get_float32_matmul_precision(),
    }
    wanted = {"threads": str(runtime.threads), "precision": "highest"}
    return loaded(start, score, signature, settings, wanted)


@contextmanager
def torch_threads_restored() -> Iterator[None]:
    """Put back PyTorch's thread count, which `load_pytorch` sets for the whole process."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
