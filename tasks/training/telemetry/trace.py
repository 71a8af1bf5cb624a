"""What a profile says: time of a step by kind of operation, and of Horovod's exchanges by stage."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, get_args

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from tasks.contracts.base import Contract

OperationKind = Literal["matmul", "optimizer", "move", "allocate", "exchange"]
OPERATION_KINDS: tuple[OperationKind, ...] = get_args(OperationKind)
NUM_TOP = 8

# The first pattern that fits an operation's name says its kind; all else that torch computes moves
# every value through memory for little arithmetic.
_KINDS: tuple[tuple[OperationKind, re.Pattern[str]], ...] = (
    (
        "exchange",
        re.compile(r"gloo|nccl|c10d|record_param_comms|all_?reduce|all_?gather|hvd|horovod"),
    ),
    ("optimizer", re.compile(r"optimizer|_fused_(adam|sgd|adagrad)|_foreach_|_multi_tensor")),
    (
        "matmul",
        re.compile(
            r"addmm|::b?mm$|baddbmm|::matmul|::linear|conv|mkldnn|onednn|gemm|attention|::lstm|::gru"
        ),
    ),
    (
        "allocate",
        re.compile(r"::(empty|resize_|new_empty)|cudaMalloc|cudaFree|\[memory\]"),
    ),
)


class ProfileSummary(Contract):
    """Profile of one rank: content of `profile-0000N.json`."""

    rank: NonNegativeInt
    num_steps: PositiveInt
    step_s: NonNegativeFloat
    """Wall seconds of a profiled step; the profiler itself makes it longer."""
    seconds: dict[OperationKind, NonNegativeFloat]
    """Seconds of a step inside operations, by kind."""
    top: tuple[tuple[str, NonNegativeFloat], ...]
    """The operations that take most, with their seconds of a step."""
    trace: str | None
    """Name of the kept trace; None where it was larger than what is kept."""

    @property
    def operations_s(self) -> float:
        """Seconds of a step inside operations."""
        return sum(self.seconds.values())


class ExchangeStages(Contract):
    """Where Horovod's exchanges spend their time, all tensors of the profiled steps added up."""

    num_exchanges: NonNegativeInt
    negotiate_s: NonNegativeFloat
    """Until every rank has its tensor ready, the wait for the next cycle included."""
    transfer_s: NonNegativeFloat
    copy_s: NonNegativeFloat
    """Into and out of the fusion buffer."""


def kind_of(name: str) -> OperationKind:
    """Kind of an operation, by its name."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "move")


def profile_summary(
    rank: int, num_steps: int, wall_s: float, operations: Mapping[str, float], trace: str | None
) -> ProfileSummary:
    """Put a rank's profile together.

    Args:
        rank: whose.
        num_steps: profiled steps.
        wall_s: seconds of all of them.
        operations: name of each operation to its own seconds, without what it calls, in all steps.
        trace: name of the trace's file, None where it was not kept.
    """
    seconds = dict.fromkeys(OPERATION_KINDS, 0.0)
    for name, spent_s in operations.items():
        seconds[kind_of(name.lower())] += spent_s / num_steps
    heaviest = sorted(operations.items(), key=lambda item: -item[1])[:NUM_TOP]
    return ProfileSummary(
        rank=rank,
        num_steps=num_steps,
        step_s=wall_s / num_steps,
        seconds=seconds,
        top=tuple((name, spent_s / num_steps) for name, spent_s in heaviest),
        trace=trace,
    )


def read_timeline(path: Path) -> ExchangeStages | None:
    """Stages of the exchanges in a Horovod timeline; None where there is none.

    A timeline is a JSON array that a rank which was killed leaves open.
    """
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return None
    for whole in (text, f"{text.rstrip(',')}]", f"{text[: text.rfind('}') + 1]}]"):
        try:
            return exchange_stages(json.loads(whole))
        except json.JSONDecodeError:
            continue
    return None


def exchange_stages(events: Iterable[Mapping[str, object]]) -> ExchangeStages:
    """Add up the stages of a timeline's begin and end events, in microseconds, by tensor."""
    open_stages: dict[object, list[tuple[str, float]]] = {}
    total = {"negotiate": 0.0, "transfer": 0.0, "copy": 0.0}
    num_exchanges = 0
    for event in events:
        stages = open_stages.setdefault(event.get("pid"), [])
        at = float(str(event.get("ts", 0)))
        if event.get("ph") == "B":
            stages.append((str(event["name"]), at))
        elif event.get("ph") == "E" and stages:
            name, began = stages.pop()
            if (stage := _stage(name)) is not None:
                total[stage] += at - began
            num_exchanges += name.startswith("NEGOTIATE_")
    return ExchangeStages(
        num_exchanges=num_exchanges,
        negotiate_s=total["negotiate"] / 1e6,
        transfer_s=total["transfer"] / 1e6,
        copy_s=total["copy"] / 1e6,
    )


def _stage(name: str) -> str | None:
    """Stage that an activity belongs to; None for one that only holds others."""
    if name.startswith("NEGOTIATE_"):
        return "negotiate"
    if name.startswith("MEMCPY_"):
        return "copy"
    return "transfer" if name.startswith(("GLOO_", "NCCL_", "MPI_")) else None
