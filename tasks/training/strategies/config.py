"""How the ranks of one training run share the work."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tasks.contracts.base import retired
from tasks.kernel.values import Described

Precision = Literal["fp32", "bf16", "fp16"]

# Where ranks on torch meet, and how long one waits for another in a collective.
STORE_FILE, TIMEOUT = "TORCH_STORE_FILE", "TORCH_EXCHANGE_TIMEOUT_S"


class StrategyConfig(Described):
    """Engine, precision and exchange of gradients; recorded with the run."""

    name: Literal["horovod", "ddp", "fsdp"] = "horovod"
    """`horovod`, `ddp` (torch.distributed): a whole replica on each rank. `fsdp`: weights and
    optimizer state cut over the ranks."""
    precision: Precision = "fp32"
    """Of forward and backward; weights, sums and the optimizer stay in fp32. `bf16` pays on CPUs
    and GPUs that have it, `fp16` (with loss scaling) on GPUs that do not."""
    compile: bool = False
    """Compile the network with torch.compile: minutes at the start, then faster steps; results are
    the same up to rounding."""
    accumulation_steps: int = Field(default=1, ge=1, le=1024)
    """Parts that a rank's rows of a step are computed in, one after the other: less memory, the
    same gradient; exchanged once a step."""
    max_gradient_norm: float | None = Field(default=None, gt=0, le=1e6)
    """Scale a step's global gradient down to this Euclidean norm; none: never."""
    gradient_compression: Literal["none", "fp16", "powersgd"] = "none"
    """What travels instead of fp32 gradients; `powersgd` adds what it left out to the next step."""
    local_steps: int = Field(default=1, ge=1, le=10_000)
    """Steps that a rank takes alone before the ranks' weights are averaged (local SGD); 1:
    gradients are exchanged at every step."""
    asynchronous: bool = False
    """Average weights in the background while the next `local_steps` steps are computed: averages
    come one round late, and a rank waits only for one that is a whole round behind. Results do not
    depend on how fast ranks are."""

    _retired = retired("tensor_parallel_size")

    @property
    def engine(self) -> Literal["horovod", "torch"]:
        """The library that carries the ranks' exchanges; the launcher prepares ranks for it."""
        return "horovod" if self.name == "horovod" else "torch"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        # Only a rank that holds the whole network can compress gradients or step alone.
        for field in ("gradient_compression", "local_steps", "asynchronous", "compile"):
            value = getattr(self, field)
            if self.name == "fsdp" and value != type(self).model_fields[field].default:
                raise ValueError(
                    f"{field}={value} is for horovod and ddp alone, but name='fsdp'; leave {field} "
                    "out or choose one of them"
                )
        # Local and asynchronous steps average weights, so there is no global gradient.
        needs_gradient = {
            "gradient_compression": self.gradient_compression != "none",
            "max_gradient_norm": self.max_gradient_norm is not None,
            "precision": self.precision == "fp16",
        }
        asked = [field for field, is_set in needs_gradient.items() if is_set]
        if asked and (self.local_steps > 1 or self.asynchronous):
            raise ValueError(
                f"{asked[0]}={getattr(self, asked[0])} needs the gradient of all ranks in each "
                "step, but with local_steps or asynchronous ranks average weights; leave one out"
            )
        if self.precision == "fp16" and self.gradient_compression == "powersgd":
            raise ValueError(
                "gradient_compression='powersgd' adds what it left out to later steps, whose "
                "gradients precision='fp16' scales differently; use precision='bf16' or "
                "gradient_compression='fp16'"
            )
        return self
