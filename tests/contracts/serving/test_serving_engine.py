"""The engine on really registered versions, with the runtimes that serve them."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from serving.config import ServedModel
from serving.engine.loading import GOLDEN_FOLDER
from serving.errors import NotComputedError, NotReadyError, UnknownModelError
from tasks.contracts.base import ModelVersionRef
from tasks.conversion.kinds.text_embedding import padded
from tasks.registry.mlflow_registry import Registry
from tests.support.conversion.cases import threads_as_before
from tests.support.conversion.forging import passed_off
from tests.support.serving.served import (
    ENCODER,
    FLIGHTS,
    QUICK,
    ServedHome,
    ask,
    flight_rows,
    scores,
    serving,
)
from tests.support.serving.standins import until

__all__ = ["threads_as_before"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

ONNX = QUICK.model_copy(update={"formats": ("onnx-fp32",)})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> ServedHome:
    """Two converted versions of a table's model, a third without variants, and an encoder."""
    world = ServedHome.at(tmp_path_factory.mktemp("served") / "a home#1")
    world.convert(world.add_flights(0))
    world.convert(world.add_flights(1), ONNX)
    world.add_flights(2)
    encoder = world.add_encoder()
    world.convert(encoder, ONNX)
    world.promote(encoder)
    return world


@pytest.fixture
def world(made: ServedHome) -> ServedHome:
    """The first version is champion."""
    made.promote(ref(made, 1))
    return made


def ref(world: ServedHome, number: int, name: str = FLIGHTS) -> ModelVersionRef:
    return Registry(world.location).version(name, number).ref


async def test_registered_versions_are_served_as_pytorch_answers_and_the_alias_is_followed(
    world: ServedHome,
) -> None:
    rows = flight_rows(40)
    first, second = (world.expected(ref(world, number), rows) for number in (1, 2))

    async with serving(world) as engine:
        answer = await ask(engine, FLIGHTS, rows)
        np.testing.assert_allclose(scores(answer), first, atol=1e-5)
        served = answer.served
        assert (served.version, served.variant, served.hardware) == ("1", "onnx-fp32", "cpu")
        (state,) = engine.states()
        assert (state.platform, state.tracks) == ("onnxruntime_onnx", ("stable",))

        world.promote(ref(world, 2))
        await until(lambda: engine.tracks(FLIGHTS)["stable"] == "2")
        answer = await ask(engine, FLIGHTS, rows)
        np.testing.assert_allclose(scores(answer), second, atol=1e-5)
        with pytest.raises(UnknownModelError, match=r"no version '9'.*it has 1, 2, 3"):
            await engine.load(FLIGHTS, "9")


async def test_sequences_of_any_length_are_served(world: ServedHome) -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(4, 60, length) for length in (3, 9, 3, 24)]

    async with serving(world, ServedModel(name=ENCODER)) as engine:
        asked = [ask(engine, ENCODER, padded([text])) for text in texts]
        for text, answer in zip(texts, await asyncio.gather(*asked), strict=True):
            expected = world.expected(ref(world, 1, ENCODER), padded([text]))
            np.testing.assert_allclose(scores(answer), expected, atol=1e-5)
        beyond = padded([np.array([2, 4000, 3])])
        with pytest.raises(NotComputedError, match="cannot compute these inputs"):
            await ask(engine, ENCODER, beyond)
        assert engine.is_ready(ENCODER)


async def test_a_version_without_variants_is_not_served(world: ServedHome) -> None:
    async with serving(world) as engine:
        with pytest.raises(NotReadyError, match="no variant was kept for hardware class 'cpu'"):
            await engine.set_tracks(FLIGHTS, {"stable": "3"})
        assert engine.tracks(FLIGHTS)["stable"] == "1"


@pytest.fixture
def spoiled(world: ServedHome) -> Iterator[tuple[ServedHome, Path]]:
    """Files of version 2's ONNX form, put back afterwards."""
    (folder,) = (world.folder(ref(world, 2)) / "variants").glob("onnx-fp32-*")
    aside = world.home / "aside"
    shutil.copytree(folder, aside)
    yield world, folder
    shutil.rmtree(folder, ignore_errors=True)
    shutil.move(aside, folder)


def _changed(folder: Path) -> None:
    model = folder / "model.onnx"
    model.write_bytes(model.read_bytes()[:-1] + b"x")


@pytest.mark.parametrize(
    ("spoil", "words"), [(_changed, "were changed or damaged"), (shutil.rmtree, "No such file")]
)
async def test_damaged_files_do_not_serve_and_what_served_goes_on(
    spoiled: tuple[ServedHome, Path], spoil: Callable[[Path], None], words: str
) -> None:
    world, folder = spoiled
    spoil(folder)

    async with serving(world) as engine:
        world.promote(ref(world, 2))
        await until(lambda: any(s.version == "2" for s in engine.states()))
        await until(lambda: any(s.state == "UNAVAILABLE" for s in engine.states()))
        (bad,) = [s for s in engine.states() if s.version == "2"]
        assert words in bad.reason
        assert (await ask(engine, FLIGHTS, flight_rows(1))).served.version == "1"


async def test_a_form_of_something_else_is_betrayed_by_the_golden_batch(tmp_path: Path) -> None:
    world = ServedHome.at(tmp_path)
    honest, other = world.add_flights(0), world.add_flights(1)
    true_form = world.convert(honest, ONNX)[0]
    false_form = world.convert(other, ONNX)[0]
    forged = passed_off(world.store, false_form, true_form)  # type: ignore[arg-type, type-var]
    world.attach(honest, (true_form.model_copy(update={"files": forged.files}),))
    world.promote(honest)

    async with serving(world) as engine:
        assert not engine.is_ready()
        with pytest.raises(NotReadyError, match="onnx-fp32 answers the golden batch"):
            await engine.load(FLIGHTS)


async def test_golden_answers_are_kept_and_a_damaged_file_is_made_anew(world: ServedHome) -> None:
    async with serving(world):
        pass
    (file,) = (world.home / GOLDEN_FOLDER / FLIGHTS).glob(f"{ref(world, 1).program_sha256}.npz")
    before = file.read_bytes()
    file.write_bytes(before[:-9])
    async with serving(world):
        pass
    assert file.read_bytes() == before


async def test_an_installation_without_a_registry_starts_and_makes_none(tmp_path: Path) -> None:
    world = ServedHome.at(tmp_path)

    async with serving(world) as engine:
        assert not engine.is_ready()
        with pytest.raises(UnknownModelError, match="no version"):
            await engine.load(FLIGHTS)
    assert not world.location.database_path.exists()
