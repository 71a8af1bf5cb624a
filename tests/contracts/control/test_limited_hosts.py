"""Conversion on lesser hosts: processors without what newer ones have, and half of one core."""

from pathlib import Path

import pytest

from tasks.contracts.release import ModelVariant
from tests.support.conversion.judged import FOR_PROCESSORS, judged_by_a_process
from tests.support.host.half_core import half_a_core
from tests.support.suite.promises import Promise, proves

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@proves(Promise.NO_FALLBACK, "a lesser processor: each target kept, or dropped with a reason")
@pytest.mark.parametrize("model", ["network", "encoder"])
@pytest.mark.parametrize("limit", ["AVX2", "SSE41"])
def test_every_target_is_kept_or_dropped_with_a_reason_on_a_lesser_processor(
    tmp_path: Path, limit: str, model: str
) -> None:
    limited = {"ONEDNN_MAX_CPU_ISA": limit}
    variants = judged_by_a_process(model, tmp_path / "limited", limited)
    assert tuple(variants) == FOR_PROCESSORS
    for variant in variants.values():
        assert variant.reason.startswith("Accepted for" if variant.accepted else "Dropped: ")
    assert "not built: this processor computes no bfloat16" in variants["openvino-bf16"].reason
    assert variants["onnx-fp32"].latencies  # its runtime does not heed the limit
    assert variants["onnx-int8"].settings["weight_bits"] == "7"
    if limit == "AVX2":  # below it OpenVINO lacks kernels
        assert variants["openvino-fp32"].latencies
        assert variants["openvino-int8"].settings["weight_bits"] == "7"


def _decided(variants: dict[str, ModelVariant]) -> dict[str, tuple[object, ...]]:
    """All that does not hang on speed: agreement, task metric, and why one was not timed."""
    return {
        name: (
            one.parity_max,
            one.parity_mean,
            one.quality_change,
            None if one.latencies else one.reason,
            one.files,
        )
        for name, one in variants.items()
    }


def test_half_a_core_decides_the_same_of_all_that_is_not_speed(tmp_path: Path) -> None:
    at_full_speed = judged_by_a_process("network", tmp_path / "full")
    with half_a_core() as host:
        slowly = judged_by_a_process("network", tmp_path / "half", inside=host.command)
        assert host.num_throttled > 0
    assert _decided(slowly) == _decided(at_full_speed)
    assert any(one.latencies for one in slowly.values())
