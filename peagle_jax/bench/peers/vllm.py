"""vLLM: an engine for each way to draft, on the same weights and token ids."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

# Beside this file, whatever Python runs it. This file's own name must not hide the library.
HERE = str(Path(__file__).resolve().parent)
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(HERE)]


def setup(settings: dict[str, Any]) -> dict[str, Any]:
    """Imports vLLM; the handlers."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # In this process, so that nothing of it runs while others are timed.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("OMP_NUM_THREADS", str(settings["threads"]))
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(settings["threads"])
    engines: dict[tuple[str, int, int], Any] = {}
    prompts = [{"prompt_token_ids": one} for one in settings["prompts"]]
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=settings["max_new_tokens"],
        stop_token_ids=settings["eos_token_ids"],
    )

    def key(request: dict[str, Any]) -> tuple[str, int, int]:
        return request["method"], request["num_draft_tokens"], request["batch"]

    def prepare(request: dict[str, Any]) -> dict[str, Any]:
        method, drafts, batch = key(request)
        speculative: dict[str, Any] | None = None
        if method == "prompt-lookup":
            speculative = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        elif method != "none":
            speculative = {"method": "eagle3", "model": settings["drafters"][method]}
            if method == "p-eagle":
                speculative["parallel_drafting"] = True
        if speculative is not None:
            speculative["num_speculative_tokens"] = drafts
        begin = time.perf_counter()
        engines[key(request)] = LLM(
            settings["target"],
            tokenizer=None,
            skip_tokenizer_init=True,
            dtype=settings["dtype"],
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=settings["max_model_len"],
            max_num_seqs=batch,
            speculative_config=speculative,
            disable_log_stats=False,
        )
        seconds = time.perf_counter() - begin
        engines[key(request)].generate(prompts[:batch], sampling, use_tqdm=False)
        return {"compile_seconds": seconds}

    def run(request: dict[str, Any]) -> dict[str, Any]:
        engine = engines[key(request)]
        before = counters(engine)
        begin = time.perf_counter()
        # max_num_seqs holds it to the batch size; a batch is filled up as soon as a row ends.
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        drafts, accepted = counters(engine)
        old_drafts, old_accepted = before
        if len(old_accepted) < len(accepted):
            old_accepted = [0] * len(accepted)
        return {
            "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
            "seconds": seconds,
            "drafts": drafts - old_drafts,
            "accepted_per_position": [a - b for a, b in zip(accepted, old_accepted, strict=True)],
        }

    return {"prepare": prepare, "run": run}


def counters(engine: Any) -> tuple[int, list[int]]:
    """Drafts, and how many of them accepted each position, since the engine began."""
    drafts, accepted = 0, []
    for metric in engine.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            drafts += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            accepted = list(metric.values)
    return drafts, accepted


if __name__ == "__main__":
    sys.path.append(HERE)
    from serve import serve  # type: ignore[import-not-found, unused-ignore]

    serve(setup)
