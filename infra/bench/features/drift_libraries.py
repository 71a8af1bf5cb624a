"""Detectors of other libraries on the streams of `drift_peers`, each in an environment of its own.

    python drift_libraries.py evidently|nannyml|river FOLDER

`FOLDER/LIBRARY.json` then holds, by copy, detector and series, a number for each watched day; a
larger one is more drift.
"""

import json
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

LEVELS = 10
"""Settings of a detector of river, each stricter than the one before: it has no number to read."""
Found = dict[str, dict[str, list[float]]]
Facts = dict[str, Any]


def evidently(rows: pd.DataFrame, facts: Facts) -> Found:
    """Distance of each column, on a day and on a week, as the preset takes for over 1,000 rows."""
    from evidently.legacy.calculations import stattests  # type: ignore[import-not-found]

    def distance(name: str, now: pd.DataFrame) -> float:
        kind, method = "num", "wasserstein"
        if name in facts["categorical"]:
            kind, method = "cat", "jensenshannon"
        known, new = (part[name].dropna() for part in (rows[rows.day < facts["reference"]], now))
        test = stattests.get_stattest(known, new, kind, method)
        return float(test(known, new, kind, None).drift_score) if len(new) else 0.0

    def series(length: int) -> dict[str, list[float]]:
        parts = [rows[rows.day.between(day - length + 1, day)] for day in facts["days"]]
        return {name: [distance(name, part) for part in parts] for name in facts["series"]}

    return {f"{length} days": series(length) for length in (1, 7)}


def nannyml(rows: pd.DataFrame, facts: Facts) -> Found:
    """Jensen-Shannon of each day, in standard deviations of the reference's days."""
    import nannyml as nml  # type: ignore[import-not-found]

    rows = rows.assign(time=pd.Timestamp("2001-01-01") + pd.to_timedelta(rows.day, unit="D"))
    calculator = nml.UnivariateDriftCalculator(
        column_names=facts["series"],
        treat_as_categorical=[n for n in facts["categorical"] if n in facts["series"]],
        continuous_methods=["jensen_shannon"],
        categorical_methods=["jensen_shannon"],
        timestamp_column_name="time",
        chunk_period="D",
    ).fit(rows[rows.day < facts["reference"]])
    watched = rows[rows.day >= facts["days"][0]]
    table = calculator.calculate(watched).to_df(multilevel=False).filter(regex="_value$|^chunk_p")
    values, known = table.filter(regex="_value$"), table.chunk_period == "reference"
    scaled = (values - values[known].mean()) / values[known].std().clip(lower=1e-9)
    scaled = scaled[~known].abs().fillna(0.0)
    return {"Jensen-Shannon": {n.split("_jensen")[0]: scaled[n].tolist() for n in scaled}}


def river(rows: pd.DataFrame, facts: Facts) -> Found:
    """The strictest setting at which a detector saw a change on a day, -1 for none.

    Each gets a day's mean in standard deviations of the reference's days. A category counts as
    whether it is the reference's most frequent one.
    """
    from river import drift  # type: ignore[import-not-found]

    makers: dict[str, Callable[[int], Any]] = {
        "ADWIN": lambda n: drift.ADWIN(delta=10.0 ** -(n / 2), clock=1),
        "KSWIN": lambda n: drift.KSWIN(10.0 ** -(1 + n / 2), window_size=40, stat_size=7, seed=0),
    }

    def strictest(make: Callable[[int], Any], name: str) -> list[float]:
        values = rows.set_index("day")[name]
        if name in facts["categorical"]:
            values = (values == values.loc[: facts["reference"] - 1].mode()[0]).astype(float)
        means = values.dropna().groupby(level=0).mean()
        known = means[: facts["reference"]]
        number = dict.fromkeys(facts["days"], -1.0)
        for level in range(LEVELS):
            detector = make(level)
            for day, mean in ((means - known.mean()) / max(float(np.std(known)), 1e-9)).items():
                detector.update(mean)
                if detector.drift_detected and day in number:
                    number[day] = float(level)
        return list(number.values())

    return {
        method: {name: strictest(make, name) for name in facts["series"]}
        for method, make in makers.items()
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    library, folder = sys.argv[1], Path(sys.argv[2])
    measure = {"evidently": evidently, "nannyml": nannyml, "river": river}[library]
    copies = json.loads((folder / "copies.json").read_text())
    found = [measure(pd.read_parquet(folder / f"{n}.parquet"), f) for n, f in enumerate(copies)]
    (folder / f"{library}.json").write_text(json.dumps([version(library), found]))
