"""`peagle eval` on a tiny pair: the table, the summary, JSON, the files, and bad input."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from peagle_jax import api, cli
from peagle_jax.commands.prompts import Record, read_records
from peagle_jax.errors import InputError
from peagle_jax.runner import Pair
from tests.decoding import tiny

GOLDEN_PROMPTS = Path(__file__).parent / "goldens" / "eval_prompts.jsonl"
LINES = (
    {"id": "first", "category": "letters", "token_ids": [3, 1, 4]},
    {"id": 2, "category": "digits|odd", "token_ids": [1, 5]},
    {"category": "letters", "token_ids": [9, 2, 6, 5]},
    {"token_ids": [3, 5]},
)
SMALL = ("--max-new-tokens", "16", "--batch-size", "4")


@pytest.fixture(scope="module")
def pair() -> Pair:
    models = tiny.make()
    drafter = models.drafters["p-eagle"]
    return Pair(models.target, drafter, models.params("p-eagle"), None, "float32")


@pytest.fixture
def loaded(monkeypatch, pair):
    """Loading gives the tiny pair; the list has what was asked for."""
    calls = []

    def load(**kwargs):
        calls.append(kwargs)
        return pair

    monkeypatch.setattr(api, "load", load)
    return calls


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)))
    return path


@pytest.fixture
def evaluate(loaded, prompts, capsys):
    """Runs the command; (stdout, stderr)."""

    def run(*options, code=0):
        assert cli.main(["eval", "--prompts", str(prompts), *SMALL, *options]) == code
        return capsys.readouterr()

    return run


def test_json_is_one_object(evaluate, loaded):
    out, err = evaluate(
        "--json", "--num-draft-tokens", "3", "--temperature", "1", "--seed", "5",
        "--check-identical", "--model", "m", "--drafter", "d", "--dtype", "float32",
    )  # fmt: skip
    assert loaded == [{"target": "m", "drafter": "d", "dtype": "float32", "weights": "full"}]
    found = json.loads(out)
    assert {key: found["settings"][key] for key in ("method", "temperature", "seed")} == {
        "method": "p-eagle",
        "temperature": 1.0,
        "seed": 5,
    }
    (result,) = found["results"]
    assert (result["num_draft_tokens"], result["prompts"], result["tokens"]) == (3, 4, 64)
    assert result["acceptance_length"] == 1 + result["accepted"] / result["drafts"] > 1.05
    assert list(result["by_category"]) == ["letters", "digits|odd", "uncategorised"]
    assert result["identical"] == 4
    by_prompt = result["by_prompt"]
    assert [entry["id"] for entry in by_prompt] == ["first", "2", "3", "4"]
    assert [entry["category"] for entry in by_prompt] == ["letters", "digits|odd", "letters", None]
    assert [entry["first_difference"] for entry in by_prompt] == [None] * 4
    assert sum(entry["drafts"] for entry in by_prompt) == result["drafts"]
    assert found["plain"]["tokens"] == 64
    assert found["plain"]["tokens_per_second"] > 0
    assert err.count("\n") == 1
    assert f"acceptance length {result['acceptance_length']:.3f} ± " in err
    assert "4 of 4 answers token-identical" in err


def test_a_table_for_each_k(evaluate):
    out, err = evaluate("--num-draft-tokens", "3,1,3")
    assert [line for line in out.splitlines() if line.startswith("K")] == ["K = 1", "K = 3"]
    first, second = out.split("K = 3")
    for text, positions in ((first, 1), (second, 3)):
        header = next(line for line in text.splitlines() if "category" in line)
        assert header.count("pos ") == positions
        rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines()]
        rows = [row for row in rows if len(row) == 4 + positions]
        assert [row[:3] for row in rows] == [
            ["letters", "2", "32"],
            ["digits|odd", "1", "16"],
            ["uncategorised", "1", "16"],
            ["all prompts", "4", "64"],
        ]
        assert all(float(row[4]) <= 1 for row in rows)
    summaries = err.splitlines()
    assert [line.partition(",")[0] for line in summaries] == ["K = 1", "K = 3"]
    assert "identical" not in err


def test_a_wide_table_keeps_its_columns(evaluate, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    out, _ = evaluate("--num-draft-tokens", "3")
    header = next(line for line in out.splitlines() if "category" in line)
    assert "acceptance length" in header
    assert "pos 3" in header
    assert "…" not in out


def test_limit_and_no_categories(evaluate, prompts):
    prompts.write_text("\n".join(json.dumps({"token_ids": line["token_ids"]}) for line in LINES))
    out, _ = evaluate("--json", "--num-draft-tokens", "3", "--limit", "3")
    (result,) = json.loads(out)["results"]
    assert result["prompts"] == 3
    assert result["by_category"] == {}
    assert "identical" not in result
    assert "first_difference" not in result["by_prompt"][0]


def test_answers_that_differ_are_counted(evaluate, monkeypatch):
    """The plain run is given another first prompt."""
    from peagle_jax.training import evaluate as library

    plainly = library.decoded_plainly

    def another_prompt(pair, prompts, **options):
        return plainly(pair, [prompts[1], *prompts[1:]], **options)

    monkeypatch.setattr(library, "decoded_plainly", another_prompt)
    out, err = evaluate("--json", "--num-draft-tokens", "3", "--check-identical")
    (result,) = json.loads(out)["results"]
    assert result["identical"] == 3
    assert result["by_prompt"][0]["first_difference"] is not None
    assert "3 of 4 answers token-identical" in err


@pytest.mark.filterwarnings("default")
def test_nothing_accepted_warns(evaluate, pair, monkeypatch):
    drafter = dict(pair.params["drafter"])
    drafter["lm_head"] = {"kernel": -drafter["lm_head"]["kernel"]}
    monkeypatch.setitem(pair.params, "drafter", drafter)
    _, err = evaluate("--num-draft-tokens", "3", "--max-new-tokens", "24")
    assert "peagle: warning: none of " in err


def test_files(evaluate, tmp_path):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "made" / "here"
    options = ("--json", "--num-draft-tokens", "1,3", "--check-identical", "--out", str(folder))
    out, _ = evaluate(*options)
    assert sorted(path.name for path in folder.iterdir()) == [
        "acceptance.png",
        "results.json",
        "results.md",
    ]
    assert json.loads((folder / "results.json").read_text()) == json.loads(out)
    page = (folder / "results.md").read_text()
    for depth, result in zip((1, 3), json.loads(out)["results"], strict=True):
        length, error = result["acceptance_length"], result["standard_error"]
        rates = "".join(f" | {rate:.3f}" for rate in result["per_position"])
        assert f"## K = {depth}\n" in page
        assert f"| all prompts | 4 | 64 | {length:.3f} ± {error:.3f}{rates} |\n" in page
    assert "| digits\\|odd | 1 |" in page
    assert "| method | p-eagle |" in page
    picture = (folder / "acceptance.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


def test_files_without_the_picture(evaluate, tmp_path, monkeypatch, loaded):
    """matplotlib is optional: its absence is told before a model is loaded."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    out = ("--num-draft-tokens", "3", "--out", str(tmp_path / "out"))
    _, err = evaluate(*out, code=2)
    assert err.startswith("peagle: error: --out: found no matplotlib")
    assert "pip install 'peagle-jax[train]'" in err
    assert loaded == []
    assert not (tmp_path / "out").exists()
    evaluate(*out, "--no-plot")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "results.json",
        "results.md",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-draft-tokens", "3,x"], "--num-draft-tokens: found '3,x', expected a number"),
        (["--num-draft-tokens", "0"], "num_draft_tokens: found 0, expected 1 to 32"),
        (["--num-draft-tokens", "3,33"], "num_draft_tokens: found 33, expected 1 to 32"),
        (["--limit", "0"], "--limit: found 0, expected 1 or more"),
        (
            ["--out", f"{__file__}/x", "--no-plot"],
            f"--out: {__file__}/x: Not a directory, expected",
        ),
        (["--num-draft-tokens", ""], "--num-draft-tokens: found '', expected a number"),
        (["--batch-size", "0"], "--batch-size: found 0, expected 1 or more"),
        (["--max-new-tokens", "0"], "max_new_tokens: found 0, expected 1 or more"),
        (["--temperature", "-1"], "temperature: found -1.0, expected 0 (greedy) or more"),
        (["--seed", "-1"], "seed: found -1, expected 0 to 2**32 - 1"),
        (["--prompts", "missing.jsonl"], "missing.jsonl: No such file or directory"),
        (["--model", "folder"], "--drafter: found none, expected one, as none ships"),
    ],
)
def test_bad_input_is_refused_before_loading(evaluate, loaded, options, message):
    _, err = evaluate(*options, code=2)
    assert err.startswith(f"peagle: error: {message}")
    assert err.count("\n") == 1
    assert loaded == []


def test_the_drafter_tells_the_method(evaluate):
    _, err = evaluate("--method", "eagle3", code=2)
    assert err.startswith("peagle: error: method: found 'eagle3', expected 'p-eagle'")


def test_a_tree_is_measured_as_one(evaluate):
    found = [
        json.loads(evaluate("--json", "--check-identical", *method, "--num-draft-tokens", "3")[0])
        for method in ((), ("--method", "p-eagle+tree"))
    ]
    assert [one["settings"]["method"] for one in found] == ["p-eagle", "p-eagle+tree"]
    chain, tree = (one["results"][0] for one in found)
    assert chain["identical"] == tree["identical"] == 4
    assert chain["accepted_per_position"] != tree["accepted_per_position"]


def test_records_keep_id_and_category(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = ['"bare"', "", '{"id": 7, "prompt": "a"}', '{"category": "c", "prompt": "b"}']
    file.write_text("\n".join(lines))
    assert read_records(file) == [
        Record("bare", "1", None),
        Record("a", "7", None),
        Record("b", "4", "c"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": [1], "prompt": "a"}', "1: id: found [1], expected a string or an integer"),
        ('{"id": true, "prompt": "a"}', "1: id: found true, expected a string or an integer"),
        ('{"category": 3, "prompt": "a"}', "1: category: found 3, expected a string"),
        ('{"category": "c"}', "1: found none of them, expected exactly one of prompt"),
    ],
)
def test_bad_records_are_named_by_line(tmp_path, line, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    with pytest.raises(InputError) as error:
        read_records(file)
    assert f"{file}:{message}" in str(error.value)


@pytest.mark.real_model
def test_the_shipped_drafter(capsys):
    argv = ["eval", "--prompts", str(GOLDEN_PROMPTS), "--limit", "2", "--max-new-tokens", "8"]
    assert cli.main([*argv, "--check-identical", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    (result,) = found["results"]
    assert (found["settings"]["model"], found["settings"]["drafter"]) == ("smollm2", "smollm2")
    assert (result["prompts"], result["tokens"], result["identical"]) == (2, 16, 2)
    # A prompt's own pass gives its first token.
    assert result["num_draft_tokens"] == 3  # what it was trained for
    assert 14 <= result["drafts"] + result["accepted"] < 14 + 2 * 3
    assert 0 < result["accepted"] == sum(result["accepted_per_position"])
    assert "2 of 2 answers token-identical" in err
