"""What a training took, on the page: in words, as a picture, and honest about what is not known."""

from tasks.contracts.telemetry import (
    DeviceTelemetry,
    Diagnosis,
    EnergyUse,
    Finding,
    TrainingTelemetry,
)
from tasks.kernel.settings import ArtifactStore
from tasks.reporting.facts import describe_cost
from tests.support.data.builders import edited
from tests.support.reporting.pages import rendered
from tests.support.reporting.run_records import EVIL, run_record
from tests.support.training.timed_ranks import HOST, rank


def telemetry(**changes: object) -> TrainingTelemetry:
    told = TrainingTelemetry(
        seconds=63.2,
        num_attempts=1,
        num_samples=60,
        ranks=tuple(rank(n, step_p50_s=0.0123, wire_bytes=3_200_000_000) for n in (0, 1)),
        host=HOST,
        energy=EnergyUse(joules=None, known_by="this host shows no RAPL counters"),
    )
    return told.model_copy(update=changes)


def test_time_and_energy_are_told_and_what_is_not_known_with_its_reason() -> None:
    words = describe_cost(telemetry())
    for part in ("took 63.2 s; 2 ranks", "100,000 rows a second", "shows no RAPL counters"):
        assert part in words
    told = describe_cost(
        telemetry(
            num_attempts=2,
            energy=EnergyUse(joules=7.2e6, known_by="12.5 W for each core", estimated=True),
        )
    )
    assert "about 7,200,000 J (2.00 kWh) of energy (12.5 W for each core)." in told
    assert "in 2 attempts" in told


def test_a_record_of_a_release_that_kept_its_cost_is_read() -> None:
    cost = {"amount": 1.5, "currency": "OMR", "energy_part": 0.5, "node_part": 1.0}
    told = telemetry()
    older = told.model_dump() | {"cost": cost, "applied": ["launch.ranks is 1 instead of auto"]}
    assert TrainingTelemetry.model_validate(older) == told


def test_the_page_shows_ranks_devices_and_the_diagnosis(store: ArtifactStore) -> None:
    finding = Finding(
        kind="input", share=0.5, evidence="Ranks wait for rows.", advice="Set reading.mode."
    )
    device = DeviceTelemetry(
        index=0, name="a device", utilisation_mean=0.71, utilisation_max=0.99,
        peak_memory_bytes=40_000_000_000, temperature_max_c=63.0, power_mean_w=None, energy_j=None,
    )  # fmt: skip
    told = telemetry(
        diagnosis=Diagnosis(summary="Input-bound: half of a step.", findings=(finding,)),
        devices=(device,),
    )
    text, page = rendered(edited(run_record(store), "model.telemetry", told), store)
    for words in (
        "What training took", "1 on one", "12.3 ms", "3.20 GB", "Ranks wait for rows.",
        "Set reading.mode.", "Input-bound: half of a step.", "a device", "40.0 GB",
    ):  # fmt: skip
        assert words in page.words, words
    assert 'href="#training-cost"' in text
    assert "Energy could not be measured" not in page.words, "the new section says it already"


def test_telemetry_of_nothing_can_be_shown_and_names_stay_names(store: ArtifactStore) -> None:
    assert "training-cost" not in rendered(run_record(store), store)[0]
    _, page = rendered(edited(run_record(store), "model.telemetry", telemetry(ranks=())), store)
    assert "No rank was measured." in page.words
    told = telemetry(ranks=(rank(0, host=EVIL),), diagnosis=Diagnosis(summary=EVIL))
    text, _ = rendered(edited(run_record(store), "model.telemetry", told), store)
    assert EVIL not in text
