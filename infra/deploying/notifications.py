"""What people are told, when, and what each message asks them to do next.

Data only: the set-up makes one automation of each entry, which renders subject and body with
Prefect's Jinja and hands them to a notification block (webhook, e-mail, Slack). Templates see
`event`, `automation`, `firing`, and `flow`, `flow_run`, `deployment`, `work_pool` where the event
concerns one; what is missing renders as nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

AUTOMATION_PREFIX = "notify-"
"""Names of the automations begin with it, so that the one about failed actions can pass over its
own kind: a message that could not be sent must not cause a message that cannot be sent."""

HOUR_S = 3600


@dataclass(frozen=True)
class Notification:
    """One thing that people are told about."""

    name: str
    """Kebab-case; unique."""
    expect: frozenset[str]
    """Events that cause it."""
    match: Mapping[str, str | tuple[str, ...]]
    """Labels that the event's resource must bear; one of several values is enough."""
    subject: str
    """Jinja, one line."""
    body: str
    """Jinja, plain text that is readable Markdown too."""
    quiet_s: int = 0
    """Seconds in which further such events of the same resource are not told; 0: each is told."""

    @property
    def automation_name(self) -> str:
        """Name of the automation that sends it."""
        return AUTOMATION_PREFIX + self.name


def _labels(**labels: str | tuple[str, ...]) -> Mapping[str, str | tuple[str, ...]]:
    """Labels by name: `resource_id` stands for `prefect.resource.id`, and so on."""
    names = {"resource_id": "prefect.resource.id", "resource_name": "prefect.resource.name"}
    return MappingProxyType({names.get(key, key): value for key, value in labels.items()})


_MODEL = _labels(resource_id="falaj.model.*")
_ALARMING = MappingProxyType({**_MODEL, "falaj.verdict": ("retrain", "data_fault")})

_RUN_LINK = """\
{% if flow_run %}Run: {{ flow_run.name }}{% if flow_run | ui_url %}, {{ flow_run | ui_url }}\
{% endif %}
{% endif %}"""

FAILED_RUN = Notification(
    name="failed-run",
    expect=frozenset(
        {"prefect.flow-run.Failed", "prefect.flow-run.Crashed", "prefect.flow-run.TimedOut"}
    ),
    match=_labels(resource_id="prefect.flow-run.*"),
    subject="Falaj: {{ flow.name }} run {{ flow_run.name }} "
    "{{ event.resource['prefect.state-name'] | lower }}",
    body="""\
{{ event.resource['prefect.state-message'] or 'No reason was recorded.' }}

{% if event.resource['prefect.state-name'] == 'Crashed' %}\
The process of the run ended from outside: killed, out of memory, or its machine went down.
{% endif %}\
"""
    + _RUN_LINK
    + """
What to do next:
1. Read the sentence above: it says what was seen, what was expected and where. The run's logs \
have the lines before it.
2. Mend that. Data that breaks its promises is mended at its source, a wrong setting in the use \
case's configuration.
3. Press Retry in the run's page, or `python -m falaj retry {{ flow_run.id }}`: the run goes on \
from the stage that failed, finished stages are not repeated.
""",
)

FAILED_ACTION = Notification(
    name="failed-action",
    expect=frozenset({"prefect.automation.action.failed"}),
    match=_labels(
        resource_id="prefect.automation.*",
        resource_name=f"!{AUTOMATION_PREFIX}*",
    ),
    subject="Falaj: automation {{ event.resource['prefect.resource.name'] }} could not act",
    body="""\
Its action {{ event.payload.action_type }} failed: \
{{ event.payload.reason or 'no reason was given' }}

What it would have started was not started. A drift verdict is not lost by this: it is stored, and \
the next sweep answers it.

What to do next:
1. `make doctor` says what is missing: a deployment, a work pool, a worker.
2. `python -m falaj deploy` writes deployments and automations anew; it leaves equal ones alone.
""",
    quiet_s=HOUR_S,
)

DRIFT = Notification(
    name="drift",
    expect=frozenset({"falaj.drift.judged"}),
    match=_ALARMING,
    subject="Falaj: {{ event.payload.model }}: "
    "{% if event.payload.verdict == 'data_fault' %}the data of {{ event.payload.window }} are "
    "faulty{% else %}drift in {{ event.payload.window }} asks for a retraining{% endif %}",
    body="""\
Model {{ event.payload.model }} of use case {{ event.payload.use_case }}, window \
{{ event.payload.window }}: verdict {{ event.payload.verdict }} \
({{ event.payload.verdict_id }}).
"""
    + _RUN_LINK
    + """
What to do next:
{% if event.payload.verdict == 'data_fault' %}\
1. Look at artifact drift-features of the run: it names the features and what is wrong with them.
2. Mend the feed and refresh the window again. The model is not retrained on a broken feed.
{% else %}\
1. Nothing, as a rule: the decision flow answers this verdict by itself, at most once an episode. \
Its record says what it chose and why.
2. To see the evidence, look at artifact drift-features of the run.
{% endif %}""",
    quiet_s=6 * HOUR_S,
)

PROMOTION_REFUSED = Notification(
    name="promotion-refused",
    expect=frozenset({"falaj.promotion.refused"}),
    match=_MODEL,
    subject="Falaj: {{ event.payload.model }} version {{ event.payload.version }} was refused "
    "by {{ event.payload.closed | length }} gate(s)",
    body="""\
{% for gate in event.payload.closed %}\
- {{ gate.gate }}: {{ gate.evidence }}
{% endfor %}
{% if event.payload.champion %}Version {{ event.payload.champion }} stays the champion.\
{% else %}There is no champion.{% endif %}
"""
    + _RUN_LINK
    + """
What to do next:
1. Read the evidence above; artifact promotion-gates of the run shows all gates.
2. If the gate is right, nothing: the next training makes a new candidate.
3. If the gate is wrong for this use case, change its bound under `promotion` in use_case.yaml and \
run the promotion again.
""",
)

PROMOTION_REJECTED = Notification(
    name="promotion-rejected",
    expect=frozenset({"falaj.promotion.rejected"}),
    match=_MODEL,
    subject="Falaj: {{ event.payload.model }} version {{ event.payload.version }} was rejected "
    "{% if event.payload.approver %}by {{ event.payload.approver }}{% else %}because nobody "
    "answered in time{% endif %}",
    body="""\
All gates were open. {{ event.payload.comment }}
{% if event.payload.champion %}Version {{ event.payload.champion }} stays the champion.\
{% else %}There is no champion.{% endif %}
"""
    + _RUN_LINK
    + """
What to do next:
1. Nothing, if that was meant: this version is not asked about again.
2. To approve it after all: `python -m falaj models approve {{ event.payload.model }} \
{{ event.payload.version }} --approver NAME`. It goes through the same gates.
""",
)

APPROVAL_WAITING = Notification(
    name="approval-waiting",
    expect=frozenset({"falaj.promotion.waiting"}),
    match=_MODEL,
    subject="Falaj: {{ event.payload.model }} version {{ event.payload.version }} waits for "
    "your approval",
    body="""\
All gates are open. {{ event.payload.summary }}
It is rejected by itself at {{ event.payload.deadline }}.
"""
    + _RUN_LINK
    + """
What to do next:
1. Open the run and press Resume: the form shows the evaluation and asks for the decision, your \
name and a comment.
2. Without the UI: `python -m falaj models approve {{ event.payload.model }} \
{{ event.payload.version }} --approver NAME`.
""",
)

RELEASE_ROLLED_BACK = Notification(
    name="release-rolled-back",
    expect=frozenset({"falaj.release.rolled-back"}),
    match=_MODEL,
    subject="Falaj: {{ event.payload.model }} version {{ event.payload.candidate }} was rolled "
    "back in step {{ event.payload.step }}",
    body="""\
{{ event.payload.reason }}

Version {{ event.payload.stable }} answers all requests again; by {{ event.payload.actor }}.
"""
    + _RUN_LINK
    + """
What to do next:
1. Nothing for those who ask: the version before is back, and the alias with it.
2. Read the evidence: `python -m falaj release status {{ event.payload.model }}`, or artifact \
release-evidence of the run.
3. To release it once more after all, promote it again, or start it by hand while it is the \
champion: deployment release-by-hand.
""",
)

RELEASE_STUCK = Notification(
    name="release-stuck",
    expect=frozenset({"falaj.release.stuck"}),
    match=_MODEL,
    subject="Falaj: the release of {{ event.payload.model }} version "
    "{{ event.payload.candidate }} waits in step {{ event.payload.step }}",
    body="""\
{{ event.payload.reason }}

Traffic stays as it is; a version that fails more often is still rolled back.
"""
    + _RUN_LINK
    + """
What to do next:
1. Mend what is broken for both versions, or the split, if that is what is said above: the release \
goes on by itself.
2. A step that lasts too long: `python -m falaj release promote {{ event.payload.model }} \
--approver NAME`, or `rollback`.
""",
    quiet_s=6 * HOUR_S,
)

STALE_FEATURES = Notification(
    name="stale-features",
    expect=frozenset({"falaj.features.stale"}),
    match=_labels(resource_id="falaj.features.*"),
    subject="Falaj: features of {{ event.payload.use_case }} are stale",
    body="""\
{% for sentence in event.payload.sentences %}\
- {{ sentence }}
{% endfor %}
Predictions go on with the values that are there.
"""
    + _RUN_LINK
    + """
What to do next:
1. See whether the source still delivers: artifact feature-monitoring of the run has the age of \
the newest row of each view.
2. When rows arrive again, the next refresh brings them online by itself. To not wait: \
`python -m falaj features refresh START END`.
""",
    quiet_s=6 * HOUR_S,
)

WORKER_OFFLINE = Notification(
    name="worker-offline",
    expect=frozenset({"prefect.work-pool.not-ready"}),
    match=_labels(resource_id="prefect.work-pool.*"),
    subject="Falaj: no worker serves work pool {{ event.resource['prefect.resource.name'] }}",
    body="""\
Its last worker has not been heard of for some time. Runs of this pool wait; none is lost.

What to do next:
1. `make status` says whether the worker runs, `make doctor` why it does not.
2. `make up` starts what is missing. On Kubernetes, look at the worker's deployment.
3. The log of a worker is in the folder platform/logs of the state folder.
""",
    quiet_s=HOUR_S,
)

NOTIFICATIONS: tuple[Notification, ...] = (
    FAILED_RUN,
    FAILED_ACTION,
    DRIFT,
    PROMOTION_REFUSED,
    PROMOTION_REJECTED,
    APPROVAL_WAITING,
    RELEASE_ROLLED_BACK,
    RELEASE_STUCK,
    STALE_FEATURES,
    WORKER_OFFLINE,
)
