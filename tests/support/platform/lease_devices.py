"""Made-up hosts for tests of leases: what is leased are names, so any will do."""

from tasks.control.leases.devices import CoreSet, Gpu, HostDevices
from tasks.kernel.cores import CoreLimit


def gpu(uuid: str, node: int | None = None, mig_profile: str | None = None) -> Gpu:
    return Gpu(
        uuid=uuid, name="NVIDIA H200", memory_bytes=1 << 37, node=node, mig_profile=mig_profile
    )


def host(
    cores: int = 4, gpus: int = 0, nodes: int = 1, limit: CoreLimit | None = None
) -> HostDevices:
    """A host with `cores` cores and `gpus` GPUs, spread evenly over its memory nodes."""
    each = cores // nodes
    return HostDevices(
        core_sets=tuple(
            CoreSet(
                node=node, physical=tuple((core,) for core in range(node * each, (node + 1) * each))
            )
            for node in range(nodes)
        ),
        core_limit=limit or CoreLimit(),
        gpus=tuple(gpu(f"GPU-{number}", number * nodes // gpus) for number in range(gpus)),
    )
