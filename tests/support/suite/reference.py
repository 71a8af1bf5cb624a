"""Write `docs/reference/`: what commands, files, variables, protocols, gates and errors there are.

    python -m tests.support.suite.reference

Everything is read from the code, so no page is edited by hand; a test holds that they are current.
"""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tasks.kernel.settings import PROJECT_ROOT

FOLDER = PROJECT_ROOT / "docs" / "reference"
VARIABLES = {
    "FALAJ_HOME": "State folder; else `.falaj` beside the project.",
    "FALAJ_FEATURE_REPO": "Project, a folder with `use_case.yaml`; else found from here upward.",
    "FALAJ_PROJECT": "Project's name in profiles of Feast; set by Falaj.",
    "FALAJ_FEATURE_REPOS": "Several projects to deploy, separated by colons.",
    "FALAJ_PROFILE": "Stores of the feature repository: `local`, `server`, `cluster`, or your own.",
    "FALAJ_DATABASE_URL": "Metadata database that several hosts share; else SQLite.",
    "FALAJ_AUDIT": "Location to which signed heads of the journal are shipped; else nowhere.",
    "FALAJ_CACHE_GB": "Bound of the copies that a machine brings from `FALAJ_STATE`; else 50.",
    "FALAJ_EXPECTED_STATE": "Identity of the state that a run has to work on; set by Falaj.",
    "FALAJ_ENCRYPTION": "Name of the key that encrypts all that is written; else nothing is.",
    "FALAJ_KEYS": "OpenBao or folder whose keys sign and encrypt; else the state's own.",
    "FALAJ_KEYS_ADMIN_TOKEN_FILE": "File with the token of OpenBao that may destroy keys.",
    "FALAJ_KEYS_CA": "PEM of the authority of OpenBao's certificate; else one trusted here.",
    "FALAJ_KEYS_TOKEN_FILE": "File, mode 600: a token of OpenBao, or two lines, an AppRole's ids.",
    "FALAJ_TRUSTED_KEYS": "Folder of public keys that alone are trusted; else the key store's.",
    "FALAJ_ZONE": "Zone of this machine; else `own` of policies/policy.yaml.",
    "FALAJ_LEASES": "Folder of the leases of devices that several platforms of a host share.",
    "FALAJ_LEASE": "Lease that a process runs under; set by Falaj.",
    "FALAJ_HARDWARE": "File of own hardware classes; else `hardware.yaml` in the state folder.",
    "FALAJ_HARDWARE_CLASS": "Hardware class that a run is of; set by Falaj.",
    "FALAJ_OWNER": "Who pays for runs, in the ledger of costs; else the process's account.",
    "FALAJ_IMAGE": "Container image that Kubernetes pools run.",
    "FALAJ_CODE_COMMIT": "Commit of the code, where it was installed without its history.",
    "FALAJ_LINEAGE_NAMESPACE": "Namespace of lineage events (OpenLineage).",
    "FALAJ_PLATFORM_CONFIG": "YAML file with options of `falaj up`.",
    "FALAJ_PLATFORM_DATABASE_URL": "PostgreSQL of Prefect's server, profile `server`.",
    "FALAJ_PLATFORM_REDIS_URL": "Redis of several Prefect servers.",
    "FALAJ_MLFLOW_PASSWORD": "Password of MLflow's server.",
    "FALAJ_NOTIFY_SLACK": "Slack webhook that people are notified by.",
    "FALAJ_NOTIFY_WEBHOOK": "Any other webhook.",
    "FALAJ_NOTIFY_EMAIL": "Block of Prefect that sends mail.",
    "FALAJ_OIDC_ISSUER": "Issuer of the tokens that the gateway takes.",
    "FALAJ_OIDC_AUDIENCE": "Audience of these tokens.",
    "FALAJ_OIDC_CLIENT_ID": "Client of Feast's servers.",
    "FALAJ_OIDC_DISCOVERY_URL": "Discovery document of Feast's servers.",
    "FALAJ_REDIS": "Feast's connection string of Redis, profiles `server` and `cluster`.",
    "FALAJ_REGISTRY_URL": "Feast's registry in PostgreSQL, profiles `server` and `cluster`.",
    "FALAJ_TENANT": "Tenant of the installation at `FALAJ_HOME` whose state is worked on.",
    "FALAJ_TOKEN_FILE": "File with the token of who gives commands, where people sign in.",
    "FALAJ_STATE": "Location of the state that machines share; else the state folder.",
    "FALAJ_TRITON_PYTHON": "Python of the environment that holds Triton.",
    "FALAJ_REPORTS_HOME": "Folder whose reports Prefect's server shows; set by Falaj.",
}
"""Every variable that the code reads."""
EVENTS = {
    "falaj.drift.judged": "A drift check ended; `falaj.verdict` is its result.",
    "falaj.decision.made": "The retraining controller decided; `falaj.action`, `falaj.outcome`.",
    "falaj.promotion.refused": "Gates refused a candidate; `closed` names them.",
    "falaj.access.break-glass": "An admin did what the duties forbid; `by` whom, `reason`.",
    "falaj.promotion.waiting": "A candidate waits for a person's answer until `deadline`.",
    "falaj.promotion.rejected": "A person rejected a candidate, or nobody answered in time.",
    "falaj.release.rolled-back": "A release went back to the champion; `reason` says why.",
    "falaj.release.stuck": "A release has not enough evidence to go on.",
    "falaj.features.stale": "Rows of feature views are older than allowed.",
}
"""Every event that flows emit, for automations."""


def commands() -> Iterator[str]:
    """The command line, by cyclopts."""
    # In a process of its own: help that was shown once changes what a command says of itself.
    program = "from falaj.__main__ import app; print(app.generate_docs())"
    text = subprocess.run(
        [sys.executable, "-c", program], cwd=PROJECT_ROOT, stdout=subprocess.PIPE, check=True
    ).stdout.decode()
    text = text.replace("# falaj", "# Command line", 1).rstrip()
    # cyclopts names the program that runs now in the usage of commands of lazily imported groups.
    yield re.sub(r"^(falaj [a-z -]+?) -m \S+", r"\1", text, flags=re.M)


def use_case() -> Iterator[str]:
    """Fields of `use_case.yaml`, as people write them."""
    from tests.support.suite.schema import use_case_schema

    yield "# use_case.yaml"
    yield "\nWhat one use case is: its data, its windows, and how each stage is done."
    yield from _fields(use_case_schema())


def files() -> Iterator[str]:
    """Fields of every other YAML file."""
    from flows.config import ImportConfig
    from infra.gateway.config import GatewayConfig
    from infra.platform.config import PlatformConfig
    from serving.config import ServingConfig
    from tasks.validation.suites import Suite

    yield "# Other files"
    for title, model in (
        ("expectations/NAME.yaml", Suite),
        ("models/NAME.yaml, of `falaj import`", ImportConfig),
        ("serving.yaml", ServingConfig),
        ("gateway.yaml", GatewayConfig),
        ("platform.yaml, of `falaj up --config`", PlatformConfig),
    ):
        yield f"\n## {title}\n"
        yield _first_paragraph(model)
        yield from _fields(model.model_json_schema())


def environment() -> Iterator[str]:
    """Environment variables."""
    yield "# Environment variables\n"
    yield from ("| variable | what it says |", "|---|---|")
    yield from (f"| `{name}` | {what} |" for name, what in sorted(VARIABLES.items()))


def http() -> Iterator[str]:
    """Paths of the serving API, and the methods of gRPC."""
    from open_inference.grpc import protocol

    from serving.protocol.http.openapi import OPERATIONS

    yield "# HTTP and gRPC\n"
    yield "The Open Inference Protocol, version 2. A running server gives its OpenAPI document at"
    yield "`/openapi.json`.\n"
    yield from ("| request | what it does |", "|---|---|")
    yield from (f"| `{one.method} {one.path}` | {one.summary} |" for one in OPERATIONS)
    for service in protocol.DESCRIPTOR.services_by_name.values():
        yield f"\n## gRPC: {service.full_name}\n"
        yield from ("| method | takes | gives |", "|---|---|---|")
        for method in service.methods:
            yield f"| `{method.name}` | `{method.input_type.name}` | `{method.output_type.name}` |"


def metrics() -> Iterator[str]:
    """Metric families of `/metrics`."""
    from serving.observability.metrics import Counting, Metrics

    yield "# Metrics\n"
    yield "Of a serving process, for Prometheus. Counters end in `_total`.\n"
    yield from ("| metric | kind | labels | what it counts |", "|---|---|---|---|")
    for family in Metrics(Counting(lambda name: True), tuple).collect():
        labels = ", ".join(f"`{label}`" for label in getattr(family, "_labelnames", ()))
        yield f"| `{family.name}` | {family.type} | {labels} | {family.documentation} |"


def events() -> Iterator[str]:
    """Prefect events."""
    yield "# Events\n"
    yield "Events of Prefect that flows emit; automations may answer them.\n"
    yield from ("| event | when |", "|---|---|")
    yield from (f"| `{name}` | {when} |" for name, when in EVENTS.items())


def gates() -> Iterator[str]:
    """Gates of a promotion."""
    from tasks.registry.gates import GATES, REGRESSION_GATES, settings_of

    yield "# Gates of a promotion\n"
    yield "All are asked, and each must be open. They fail closed: what is missing closes a gate.\n"
    yield from (
        "| gate | classification | regression | open when | settings (`promotion`) |",
        "|---|:-:|:-:|---|---|",
    )
    for name, gate in (REGRESSION_GATES | GATES).items():
        signs = ("yes" if name in of else "" for of in (GATES, REGRESSION_GATES))
        line = f"| `{name}` | {' | '.join(signs)} | {_first_paragraph(gate)} | "
        yield f"{line}{', '.join(f'`{name}`' for name in settings_of(gate))} |"


def errors() -> Iterator[str]:
    """Error classes with their codes."""
    from tasks.kernel.errors import FalajError

    yield "# Errors\n"
    yield "A message says what was seen, what was expected, where, and what to do. Its code says"
    yield "what kind of error it is, and does not change.\n"
    yield from ("| code | error | what it means |", "|---|---|---|")
    found, waiting = [], [FalajError]
    while waiting:
        kind = waiting.pop()
        found.append(kind)
        waiting.extend(k for k in kind.__subclasses__() if k.__module__ == kind.__module__)
    for kind in sorted(found, key=lambda kind: kind.code):
        yield f"| {kind.code} | `{kind.__name__}` | {_first_paragraph(kind)} |"


def licences() -> Iterator[str]:
    """Packages that are installed here, of those that Falaj requires."""
    from infra.licences import required
    from tasks.governance.bill import licence_of

    packages, base = required(), required(())
    yield "# Licences\n"
    yield (
        f"{len(packages)} packages are required by Falaj with its extras `train`, `convert` and "
        f"`serve`, {len(base)} of\nthem without any extra. Read from what is installed.\n"
    )
    yield "| package | version | licence |\n|---|---|---|"
    for one in packages:
        yield f"| {one.name} | {one.version.partition('+')[0]} | {licence_of(one.metadata)} |"


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "command-line": commands,
    "use-case": use_case,
    "files": files,
    "environment": environment,
    "http": http,
    "metrics": metrics,
    "events": events,
    "gates": gates,
    "errors": errors,
    "licences": licences,
}


def page(name: str) -> str:
    """Text of one page."""
    return "\n".join(PAGES[name]()) + "\n"


def _first_paragraph(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    """A table of all fields, those of inner models under the path to them."""
    yield from ("", "| field | type | default | what it says |", "|---|---|---|---|")
    yield from _rows(schema, schema.get("$defs", {}), "", ())


def _rows(
    schema: dict[str, Any], definitions: dict[str, Any], path: str, above: tuple[str, ...]
) -> Iterator[str]:
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        parts = [field, *field.get("anyOf", ()), *field.get("allOf", ())]
        items = [part.get("items") or part.get("additionalProperties") for part in parts]
        inner = [p["$ref"].rpartition("/")[2] for p in (*parts, *items) if _refers(p)]
        inner = [kind for kind in inner if kind not in above and "properties" in definitions[kind]]
        default = "required" if name in required else _shown(field.get("default"))
        text = " ".join(field.get("description", "").split()).replace("|", "\\|")
        if not inner or text:
            kinds = dict.fromkeys(_kind(part, definitions) for part in parts)
            kind = " or ".join(filter(None, kinds))
            yield f"| `{path}{name}` | {kind} | {default} | {text} |"
        for part in inner:
            end = "[]." if any(_refers(item) for item in items) else "."
            yield from _rows(definitions[part], definitions, path + name + end, (*above, part))


def _refers(part: Any) -> bool:
    return isinstance(part, dict) and "$ref" in part


def _kind(part: dict[str, Any], definitions: dict[str, Any]) -> str:
    if "$ref" in part:
        return _kind(definitions[part["$ref"].rpartition("/")[2]], definitions)
    if "enum" in part or "const" in part:
        return ", ".join(f"`{value}`" for value in part.get("enum", [part.get("const")]))
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {part[name]:g}" for name, sign in bounds.items() if name in part]
    return " ".join([part.get("type", ""), *limits]).strip()


def _shown(value: object) -> str:
    return "" if value in (None, {}, [], "") or isinstance(value, dict) else f"`{value}`"


def main(folder: Path = FOLDER) -> None:
    """Write all pages."""
    for name in PAGES:
        (folder / f"{name}.md").write_text(page(name), encoding="utf-8")


if __name__ == "__main__":
    main()
