"""With libtpu installed (no TPU needed), the TPU compiler counts what a plan counts."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Wide enough that padding is little; a head is a whole register, so pages have none.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_the_compiler_counts_as_the_plan_does(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = [
        *(sys.executable, "-m", "peagle_jax.cli", "plan", "--model", str(tmp_path), "--json"),
        *("--topology", "v6e:2x2", "--mesh", "data=2,model=2", "--method", "prompt-lookup"),
        *("--batch", "16", "--context", "2048", "--compile"),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (plan,) = found["meshes"]
    compiled = {one["name"]: one for one in found["compiled"]}
    assert list(compiled) == ["prefill", "insert", "step"]
    weights = plan["weights"]
    pages = (plan["pages_needed"] + 1) * plan["page_bytes"]
    all_bytes = sum(weights.values()) + pages + plan["slot_bytes"]
    # Prefill multiplies with no head, insertion with nothing else, and looks at no page.
    for name, taken, written in (
        ("prefill", all_bytes - weights["head"], pages),
        ("insert", weights["head"], 0),
        ("step", all_bytes, pages),
    ):
        one = compiled[name]
        assert one["arguments"] == pytest.approx(taken, rel=0.02), name
        assert one["arguments"] + one["beside"] == pytest.approx(all_bytes, rel=0.02), name
        # Pages and slots are written in place.
        assert one["in_place"] == pytest.approx(written, rel=0.02, abs=1e6), name
        assert one["total"] == pytest.approx(all_bytes + one["temporaries"], rel=0.02), name
    step = compiled["step"]
    assert step["temporaries"] > 0
    # Two devices share each layer: a sum after attention, one after the MLP, one of the embedding.
    assert step["text"]["collectives"]["all-reduce"]["count"] >= 3
    # Pages are read by the kernels; what else there is takes no less than reading the weights.
    assert step["text"]["kernels"] >= 1
    assert step["compiler_ms"] > 0.8 * sum(weights.values()) / 1640e6
