"""Devices of this host for a part of a flow: waited for in sight, held, given back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prefect import runtime
from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger

from tasks.control.config import LeaseRequest, StageLease
from tasks.control.leases.devices import HostDevices
from tasks.control.leases.repository import Lease, LeaseRepository, Outlook, acquire, applied
from tasks.kernel.settings import Settings

ARTIFACT_KEY = "devices"


@contextmanager
def leased(request: LeaseRequest, policy: StageLease) -> Iterator[Lease | None]:
    """Hold devices of this host, and confine this process and all it starts to them.

    To be entered in a flow. The wait is seen in its log and in its artifact `devices`.

    Args:
        request: what is needed.
        policy: whether to lease at all, with which priority, for how long to wait.

    Yields:
        The lease; None where the policy says that none is needed.

    Raises:
        ConfigurationError: this host does not have what is asked for.
        LeaseError: it was not to be had in time.
        StorageError: the disk refuses.
    """
    if not policy.enabled:
        get_run_logger().info("no devices are leased: lease.enabled is false")
        yield None
        return
    repository = LeaseRepository(Settings.from_environment().leases_path)
    holder = f"{runtime.flow_run.name} ({runtime.flow_run.id})"
    with (
        acquire(
            repository,
            request,
            holder,
            priority=policy.priority,
            wait_s=policy.wait_s,
            on_wait=lambda outlook: _show_wait(request, outlook),
        ) as lease,
        applied(lease.grant, lease.lease_id),
    ):
        get_run_logger().info("holds %s", lease.grant)
        _show(f"Holds **{lease.grant}**.")
        yield lease


def training_request(policy: StageLease, device: str, num_ranks: int) -> LeaseRequest:
    """What a training holds: as configured, or all cores that this process may use.

    Args:
        policy: its `request` is taken where there is one.
        device: with `cuda` a GPU for each rank, as far as there are; slices (MIG) are leased one by
            one, by profile.
        num_ranks: of the training.
    """
    if policy.request is not None:
        return policy.request
    found = HostDevices.of_this_process()
    if device != "cuda":
        return LeaseRequest(cores=found.num_cores)
    whole = [gpu for gpu in found.gpus if gpu.mig_profile is None]
    slices = [gpu.mig_profile for gpu in found.gpus if gpu.mig_profile is not None]
    profile = slices[0] if slices and not whole else None
    gpus = max(1, min(num_ranks, len(whole)))
    return LeaseRequest(cores=found.num_cores, gpus=gpus, mig_profile=profile)


def _show_wait(request: LeaseRequest, outlook: Outlook) -> None:
    holders = [str(each) for each in outlook.holders]
    get_run_logger().info(
        "waits for %s: %d before this run; held by %s",
        request,
        outlook.num_before,
        "; ".join(holders) or "nobody, but kept for those before this run",
    )
    listed = "".join(f"\n- {each}" for each in holders)
    _show(f"Waits for **{request}**; {outlook.num_before} before this run. Held by:\n{listed}")


def _show(markdown: str) -> None:
    write: Callable[..., object] = create_markdown_artifact
    write(markdown, key=ARTIFACT_KEY, description="Devices of this host that the run works on.")
