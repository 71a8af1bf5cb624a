"""Where results of `open-question` kept by earlier versions say that `OpenQuestion` is."""

from tasks.registry.promotion import OpenQuestion

__all__ = ["OpenQuestion"]
