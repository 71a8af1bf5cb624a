"""How Triton is to serve a form: batching, copies, warm-up."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from tasks.contracts.base import field_title

TRITON_FORMATS = {"onnx": "model.onnx", "tensorrt": "model.plan"}
"""What Triton serves: the file of each format, in a form's folder and in a repository alike."""


class TritonConfig(BaseModel):
    """How Triton is to serve a form that was kept."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    onnx_backend: Literal["onnxruntime", "python"] = Field(
        default="onnxruntime",
        description="What runs ONNX: Triton's own backend, or ONNX Runtime of a Python that the "
        "server is given, where it was built without that backend (on processors alone).",
    )
    max_batch_rows: PositiveInt = Field(
        default=1024, le=65_536, description="Rows of one execution; larger requests are refused."
    )
    max_wait_us: NonNegativeInt = Field(
        default=0, le=1_000_000, description="Microseconds a request may wait for others."
    )
    max_queue_requests: PositiveInt = Field(
        default=256, le=1_000_000, description="Requests that wait; a further one is refused."
    )
    timeout_ms: PositiveInt = Field(
        default=1000, le=600_000, description="Milliseconds after which who waits is refused."
    )
    instances: PositiveInt = Field(
        default=1, le=64, description="Copies that run side by side, on each device."
    )
    warmup_rows: tuple[PositiveInt, ...] = Field(
        default=(1, 32), description="Rows of the executions before a model is ready."
    )
    length_step: PositiveInt = Field(
        default=16,
        le=4096,
        description="Texts are padded to a multiple of so many tokens: requests of one length are "
        "executed together.",
    )
