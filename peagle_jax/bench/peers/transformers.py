"""Hugging Face transformers: `generate` on the same token ids, plain or with prompt lookup."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

# Beside this file, whatever Python runs it. This file's own name must not hide the library.
HERE = str(Path(__file__).resolve().parent)
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(HERE)]


def setup(settings: dict[str, Any]) -> dict[str, Any]:
    """Loads the model; the handlers."""
    import torch
    import transformers

    torch.set_num_threads(settings["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        settings["target"], dtype=getattr(torch, settings["dtype"])
    ).eval()
    prompts, new = settings["prompts"], settings["max_new_tokens"]
    ends = settings["eos_token_ids"]

    def answer(group: list[list[int]], request: dict[str, Any]) -> list[list[int]]:
        width = max(map(len, group))
        ids = torch.tensor([[0] * (width - len(one)) + one for one in group])
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in group])
        extra = {}
        if request["method"] == "prompt-lookup":
            extra["prompt_lookup_num_tokens"] = request["num_draft_tokens"]
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=new,
                eos_token_id=ends,
                pad_token_id=ends[0],
                **extra,
            )
        return [cut(row, ends) for row in out[:, width:].tolist()]

    def prepare(request: dict[str, Any]) -> dict[str, Any]:
        if request["method"] == "prompt-lookup" and request["batch"] > 1:
            raise ValueError("prompt lookup decodes one prompt at a time")
        answer(prompts[: request["batch"]], request)
        return {"compile_seconds": 0.0}

    def run(request: dict[str, Any]) -> dict[str, Any]:
        # Prompts of like length share a batch, as this is no test of padding.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        answers: dict[int, list[int]] = {}
        begin = time.perf_counter()
        for at in range(0, len(order), request["batch"]):
            group = order[at : at + request["batch"]]
            found = answer([prompts[i] for i in group], request)
            answers.update(zip(group, found, strict=True))
        seconds = time.perf_counter() - begin
        return {"token_ids": [answers[i] for i in range(len(prompts))], "seconds": seconds}

    return {"prepare": prepare, "run": run}


def cut(tokens: list[int], ends: list[int]) -> list[int]:
    """Up to the end of sequence, which counts."""
    at = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: at + 1]


if __name__ == "__main__":
    sys.path.append(HERE)
    from serve import serve  # type: ignore[import-not-found, unused-ignore]

    serve(setup)
