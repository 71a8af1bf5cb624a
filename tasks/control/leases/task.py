"""Devices of this host for a part of a flow: waited for in sight, held, given back."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prefect import runtime
from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger

from tasks.control.leases.config import LeaseRequest, StageLease
from tasks.control.leases.devices import HostDevices
from tasks.control.leases.leases import Lease, acquire, applied
from tasks.control.leases.placement import LeaseTerms
from tasks.control.leases.repository import LeaseRepository, Outlook
from tasks.kernel.errors import LeaseLostError
from tasks.kernel.settings import Settings

ARTIFACT_KEY = "devices"
TERMS = LeaseTerms()


@contextmanager
def leased(request: LeaseRequest, policy: StageLease) -> Iterator[Lease | None]:
    """Hold devices of this host, and confine this process and all it starts to them.

    To be entered in a flow. The wait is seen in its log and in its artifact `devices`. Should the
    lease be lost, `LeaseLostError` is raised in the thread that is inside the block.

    Args:
        request: what is needed.
        policy: whether to lease at all, with which priority, for how long to wait.

    Yields:
        The lease; None where the policy says that none is needed.

    Raises:
        ConfigurationError: this host does not have what is asked for.
        LeaseError: it was not to be had in time.
        LeaseLostError: it was lost while it was held.
        TransientError, StorageError: the database of the leases does not answer, or refuses.
    """
    if not policy.enabled:
        get_run_logger().info("no devices are leased: lease.enabled is false")
        yield None
        return
    repository = LeaseRepository(Settings.from_environment().metadata_url, TERMS)
    with (
        _Interruption() as interruption,
        acquire(
            repository,
            request,
            _holder(),
            priority=policy.priority,
            wait_s=policy.wait_s,
            on_wait=lambda outlook: _show_wait(request, outlook),
            on_lost=interruption.raise_there,
        ) as lease,
        applied(lease.grant, lease.lease_id),
    ):
        get_run_logger().info("holds %s", lease)
        _show(f"Holds **{lease.grant}** (fencing token {lease.token}).")
        try:
            yield lease
        except LeaseLostError:
            raise LeaseLostError(lease.why_lost) from None
        lease.check()


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


def _holder() -> str:
    return f"{runtime.flow_run.name} ({runtime.flow_run.id})"


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


class _Interruption:
    """Raises `LeaseLostError` in the thread that entered it, as long as it is inside.

    Between two steps of the thread's program: a call into a library ends first.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._is_inside = True

    def __enter__(self) -> _Interruption:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_inside = False

    def raise_there(self, _: str) -> None:
        """Interrupt that thread, if it has not left."""
        with self._lock:
            if self._is_inside:
                thread, error = ctypes.c_ulong(self._thread), ctypes.py_object(LeaseLostError)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)
