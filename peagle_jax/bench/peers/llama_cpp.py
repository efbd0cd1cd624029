"""llama.cpp through llama-cpp-python: a GGUF file in its own precision, one prompt at a time."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

# Beside this file, whatever Python runs it. This file's own name must not hide the library.
HERE = str(Path(__file__).resolve().parent)
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(HERE)]


def setup(settings: dict[str, Any]) -> dict[str, Any]:
    """Imports the library; the handlers."""
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    if not settings["source"].endswith(".gguf"):
        raise ValueError(f"it reads GGUF files alone, found {settings['source']}")
    models: dict[tuple[str, int], Any] = {}
    prompts, ends = settings["prompts"], set(settings["eos_token_ids"])

    def key(request: dict[str, Any]) -> tuple[str, int]:
        return request["method"], request["num_draft_tokens"]

    def answer(model: Any, prompt: list[int]) -> list[int]:
        model.reset()
        tokens: list[int] = []
        for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
            tokens.append(token)
            if token in ends or len(tokens) == settings["max_new_tokens"]:
                return tokens
        return tokens

    def prepare(request: dict[str, Any]) -> dict[str, Any]:
        if request["batch"] > 1:
            raise ValueError("it decodes one prompt at a time here")
        method, drafts = key(request)
        lookup = method == "prompt-lookup"
        begin = time.perf_counter()
        models[key(request)] = llama_cpp.Llama(
            settings["source"],
            n_ctx=settings["max_model_len"],
            # Drafts need the logits of all positions; unasked it has room for those of 512.
            logits_all=lookup,
            n_threads=settings["threads"],
            n_threads_batch=settings["threads"],
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=drafts) if lookup else None,
            verbose=False,
        )
        seconds = time.perf_counter() - begin
        answer(models[key(request)], prompts[0])
        return {"compile_seconds": seconds}

    def run(request: dict[str, Any]) -> dict[str, Any]:
        model = models[key(request)]
        begin = time.perf_counter()
        answers = [answer(model, prompt) for prompt in prompts]
        return {"token_ids": answers, "seconds": time.perf_counter() - begin}

    return {"prepare": prepare, "run": run}


if __name__ == "__main__":
    sys.path.append(HERE)
    from serve import serve  # type: ignore[import-not-found, unused-ignore]

    serve(setup)
