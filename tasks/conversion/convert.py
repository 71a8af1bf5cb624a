"""Which variants of a model are worth having, and why the others are not.

From simple to complex, each variant has to carry its provenance, answer like PyTorch, keep the task
metric, and be measured faster than the fastest simpler variant at one batch size at least.
"""

import logging
from collections.abc import Sequence
from functools import partial

from tasks.contracts.release import BuiltVariant, ModelVariant
from tasks.conversion.decide import EAGER, THROUGHPUT_ROWS, Measurements, choose, decide
from tasks.conversion.examine import Examined, Reference, examine, take_reference
from tasks.conversion.measure import measure_throughput, time_interleaved
from tasks.conversion.targets.catalog import FORMATS
from tasks.conversion.targets.interface import ConversionJob, Runtime
from tasks.conversion.targets.pytorch import torch_threads_restored
from tasks.conversion.variants import load_variant
from tasks.kernel.cores import usable_cores
from tasks.kernel.errors import ConfigurationError

LOGGER = logging.getLogger(__name__)


def judge_variants(job: ConversionJob, built: tuple[BuiltVariant, ...]) -> tuple[ModelVariant, ...]:
    """Compare, measure, and accept or drop a variant of every configured format.

    Args:
        job: the program, the rows of which its kind chooses some to judge on, and the formats.
        built: variants as they were built, failed ones included, in any order.

    Returns:
        One variant a format, from simple to complex; dropped ones too, with the reason.

    Raises:
        ConfigurationError: a format is not among `built`, or the rows are not of the model's kind.
        ArtifactError: the program or the rows are absent or damaged. Such a variant is dropped.
        DataContractError: the rows cannot judge: none, labels that are all equal, other columns.
        ConversionError: the program itself does not load.
    """
    config, by_name = job.config, {one.name: one for one in built}
    if absent := [name for name in config.formats if name not in by_name]:
        raise ConfigurationError(
            f"there is no built variant of {', '.join(absent)}, only of "
            f"{', '.join(by_name) or 'nothing'}; build every format first, failed ones count"
        )
    wanted = [by_name[one.name] for one in FORMATS if one.name in config.formats]
    with torch_threads_restored():
        reference = take_reference(job)
        examined = [examine(one, reference) for one in wanted]
        measured = _measure(reference, examined)
    variants = choose(decide(job, examined, measured, reference.judged), config)
    for variant in variants:
        LOGGER.info("%s: %s", variant.name, variant.reason)
    return variants


def _measure(reference: Reference, examined: Sequence[Examined]) -> Measurements:
    """Everything that is measured of the variants that passed, and of PyTorch eager beside them."""
    job, config = reference.job, reference.job.config
    passed = {one.built.name: one for one in examined if one.model and not one.failure}
    if not passed:
        return Measurements({}, {})
    models = {EAGER: reference.model, **{name: one.model for name, one in passed.items()}}
    timings = {}
    for batch_rows, batch in zip(config.batch_sizes, reference.calls["timed"], strict=True):
        calls = {name: partial(model, batch) for name, model in models.items() if model}
        timings[batch_rows] = time_interleaved(calls, *config.rounds)
    runtime = Runtime(config.threads, config.hardware_class)
    throughputs = {
        name: measure_throughput(
            partial(load_variant, one.built, job.program, runtime, job.store),
            reference.judged.timing_batch(THROUGHPUT_ROWS),
            max(1, usable_cores() // config.threads),
            config.rounds[1],
        )
        for name, one in passed.items()
    }
    return Measurements(timings, throughputs)
