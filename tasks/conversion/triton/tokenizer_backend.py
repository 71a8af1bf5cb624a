"""Runs inside Triton: texts to token ids, with the tokenizer file of the model behind it.

Cut after the most tokens that the model takes, and padded to a multiple of a step, so that requests
of about the same length are executed together; the mask hides the padding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]
from tokenizers import Tokenizer


class TritonPythonModel:
    """What Triton's Python backend looks for."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer file beside this one."""
        config = json.loads(args["model_config"])
        number = {name: value["string_value"] for name, value in config["parameters"].items()}
        self._most, self._step = int(number["max_tokens"]), int(number["length_step"])
        folder = Path(args["model_repository"]) / args["model_version"]
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(self._most)
        self._tokenizer.no_padding()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request by itself: another one's bytes must not spoil it."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        values = pb_utils.get_input_tensor_by_name(request, "text").as_numpy().reshape(-1)
        try:
            texts = [bytes(value).decode("utf-8") for value in values]
        except UnicodeDecodeError as exc:
            error = pb_utils.TritonError(f"a text is not UTF-8 ({exc}); send UTF-8")
            return pb_utils.InferenceResponse(error=error)
        found = [encoding.ids for encoding in self._tokenizer.encode_batch(texts)]
        longest = max(len(ids) for ids in found)
        width = min(self._most, -(-longest // self._step) * self._step)
        ids = np.zeros((len(found), width), dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, tokens in enumerate(found):
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1
        tensors = [pb_utils.Tensor("input_ids", ids), pb_utils.Tensor("attention_mask", mask)]
        return pb_utils.InferenceResponse(tensors)
