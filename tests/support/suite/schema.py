"""JSON schema of `use_case.yaml`, by which editors complete and check it.

`python -m tests.support.suite.schema > flows/use-case.schema.json` writes it; a test compares them.
"""

import json
import sys
from typing import Any

from flows.config import PipelineConfig, SplitDates

DERIVED = {
    "FeatureTable": ("sql", "from", "suite"),
    "RawTable": ("suite",),
    "RegistryConfig": ("model_name", "experiment"),
    "TrainingSet": ("sql", "from", "feature_service", "row_id", "label_definition"),
}
"""Settings whose default is no value of theirs, but what follows from others."""


def use_case_schema() -> dict[str, Any]:
    """The schema of what a person writes: a use case with its short forms."""
    schema = PipelineConfig.model_json_schema()
    parts = schema["$defs"]
    parts["SplitDates"] = SplitDates.model_json_schema()
    for day in parts["SplitDates"]["properties"].values():
        day.pop("format")  # a day needs no time
    schema["properties"]["splits"]["anyOf"] = [
        {"$ref": "#/$defs/SplitDates"},
        {"$ref": schema["properties"]["splits"].pop("$ref")},
    ]
    for name in ("FeatureTable", "TrainingSet"):
        fields = parts[name]["properties"]
        fields["source"]["title"] = "From"
        parts[name]["properties"] = {"from" if n == "source" else n: f for n, f in fields.items()}
    for name, derived in DERIVED.items():
        for field in derived:
            parts[name]["properties"][field].pop("default", None)
    schema["properties"]["registry"].pop("default")
    schema["properties"]["model"] = parts["TrainingConfig"]["properties"]["model"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "use_case.yaml",
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(use_case_schema(), indent=1, sort_keys=True) + "\n")
