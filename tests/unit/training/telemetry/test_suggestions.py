from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.contracts.telemetry import Diagnosis, Finding, Setting
from tasks.training.config import TrainingConfig
from tasks.training.telemetry.suggestions import (
    APPLIED_FIELDS,
    kind_of_job,
    note_diagnosis,
    read_advice,
    with_suggestions,
)


class Launch(BaseModel):
    model_config = ConfigDict(frozen=True)

    ranks: int | str = "auto"
    threads_per_rank: int | str = "auto"


class Job(BaseModel):
    """Fields of a training configuration, with a rule between two of them."""

    model_config = ConfigDict(frozen=True)

    launch: Launch = Launch()
    global_batch_size: int = Field(default=2048, le=8192)
    hidden_size: int = 8
    seed: int = 0

    @model_validator(mode="after")
    def _is_no_unlucky_number(self) -> Job:
        if self.launch.ranks == 13:
            raise ValueError("13 ranks bring bad luck")
        return self


def diagnosis(**suggestions: Setting) -> Diagnosis:
    named = {name.replace("__", "."): value for name, value in suggestions.items()}
    finding = Finding(
        kind="communication", share=0.5, evidence="seen", advice="do", suggestions=named
    )
    return Diagnosis(summary="Communication-bound.", findings=(finding,))


def learn(folder: Path, job: Job, **suggestions: Setting) -> None:
    note_diagnosis(folder, kind_of_job(job), job, diagnosis(**suggestions))


def applied(folder: Path, job: Job) -> tuple[Job, tuple[str, ...]]:
    return with_suggestions(job, folder, kind_of_job(job))


def test_defaults_take_what_the_last_diagnosis_suggests(tmp_path: Path) -> None:
    learn(tmp_path, Job(), launch__ranks=1, launch__threads_per_rank=2)
    job, told = applied(tmp_path, Job(seed=4))
    assert job == Job(launch=Launch(ranks=1, threads_per_rank=2), seed=4)
    assert told == (
        "launch.ranks is 1 instead of auto: Communication-bound.",
        "launch.threads_per_rank is 2 instead of auto: Communication-bound.",
    )


def test_what_a_configuration_sets_itself_is_kept(tmp_path: Path) -> None:
    learn(tmp_path, Job(), global_batch_size=4096)
    assert applied(tmp_path, Job(global_batch_size=1024)) == (Job(global_batch_size=1024), ())


def test_another_kind_of_job_learns_nothing(tmp_path: Path) -> None:
    learn(tmp_path, Job(), global_batch_size=4096)
    assert applied(tmp_path, Job(hidden_size=16)) == (Job(hidden_size=16), ())


def test_fields_outside_the_rule_are_never_changed(tmp_path: Path) -> None:
    learn(tmp_path, Job(), hidden_size=99, strategy__precision="bf16")
    assert applied(tmp_path, Job()) == (Job(), ())


def test_an_applied_setting_stays_when_there_is_nothing_more_to_change(tmp_path: Path) -> None:
    learn(tmp_path, Job(), global_batch_size=4096)
    second, _ = applied(tmp_path, Job())
    note_diagnosis(tmp_path, kind_of_job(Job()), second, Diagnosis(summary="Nothing to change."))
    assert applied(tmp_path, Job())[0] == second


def test_runs_settle_even_where_diagnoses_contradict_each_other(tmp_path: Path) -> None:
    """One says more rows, the next fewer: each value is tried once."""
    seen = []
    for number in range(8):
        job, _ = applied(tmp_path, Job())
        seen.append(job.global_batch_size)
        learn(tmp_path, job, global_batch_size=4096 if number % 2 == 0 else 2048)
    assert seen == [2048] + [4096] * 7


def test_a_value_that_does_not_fit_is_left_out_and_told(tmp_path: Path) -> None:
    learn(tmp_path, Job(), global_batch_size=1 << 20, launch__ranks=13)
    job, told = applied(tmp_path, Job())
    assert job == Job()
    assert told[0].startswith(
        "global_batch_size stays 2048: 1048576 was suggested but does not fit"
    )
    assert "bad luck" in told[1]


def test_the_heaviest_finding_has_the_last_word(tmp_path: Path) -> None:
    [heavy], [light] = (
        diagnosis(global_batch_size=4096).findings,
        diagnosis(global_batch_size=8192).findings,
    )
    both = Diagnosis(summary="Both.", findings=(heavy, light))
    note_diagnosis(tmp_path, kind_of_job(Job()), Job(), both)
    assert applied(tmp_path, Job())[0].global_batch_size == 4096


def test_damaged_advice_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    learn(tmp_path, Job(), global_batch_size=4096)
    [file] = tmp_path.iterdir()
    file.write_text("{}")
    assert applied(tmp_path, Job()) == (Job(), ())
    assert "is no advice of this version" in caplog.text


def test_no_advice_changes_nothing(tmp_path: Path) -> None:
    assert read_advice(tmp_path / "none", "kind") is None
    assert applied(tmp_path / "none", Job()) == (Job(), ())


def test_the_fields_of_the_rule_are_fields_of_a_training() -> None:
    for field in APPLIED_FIELDS:
        value: object = TrainingConfig()
        for part in field.split("."):
            assert hasattr(value, part), field
            value = getattr(value, part)


def test_a_training_takes_suggestions_and_the_telemetry_makes_no_other_kind(tmp_path: Path) -> None:
    asked = TrainingConfig.model_validate({"telemetry": {"apply_suggestions": True}, "seed": 5})
    kind = kind_of_job(asked, "columns")
    assert kind == kind_of_job(TrainingConfig(), "columns")
    assert kind != kind_of_job(TrainingConfig(), "other columns")
    note_diagnosis(tmp_path, kind, asked, diagnosis(launch__ranks=1, launch__threads_per_rank=2))
    config, _ = with_suggestions(asked, tmp_path, kind)
    assert (config.launch.ranks, config.launch.threads_per_rank) == (1, 2)
