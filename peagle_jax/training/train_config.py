"""A training run's configuration: TOML tables as frozen dataclasses, checked key by key."""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from peagle_jax.config import MAX_DRAFT_TOKENS
from peagle_jax.errors import InputError


def _bounded(default: Any, low: Any = None, high: Any = None) -> Any:
    """A field whose number, or each of whose numbers, lies in [low, high]."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high})


@dataclasses.dataclass(frozen=True)
class DrafterSection:
    """The network that is trained. None = see `initial.py`: as in the target, or in the drafter
    that training goes on from.

    init: "target", "random", or the path of a drafter to go on from.
    window: sliding window of every layer in tokens, None = full attention.
    """

    method: Literal["p-eagle", "eagle3"] | None = None
    num_draft_tokens: int = _bounded(6, 1, MAX_DRAFT_TOKENS)
    num_layers: int | None = _bounded(None, 1)
    intermediate_size: int | None = _bounded(None, 1)
    num_heads: int | None = _bounded(None, 1)
    num_kv_heads: int | None = _bounded(None, 1)
    head_dim: int | None = _bounded(None, 2)
    window: int | None = _bounded(None, 1)
    draft_vocab_size: int | None = _bounded(None, 1)
    aux_layer_ids: tuple[int, ...] | None = _bounded(None, 0)
    mask_token_id: int | None = _bounded(None, 0)
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    init: str = "target"


@dataclasses.dataclass(frozen=True)
class DataSection:
    """Answers of the target, packed into `batch` rows of `length` tokens a step.

    answers: folders that `peagle distill` wrote.
    overlong, empty: what is done with documents longer than a row, and with those whose
        answer has no tokens.
    epochs: how often the data is gone through; None = until `train.steps`.
    """

    answers: tuple[str, ...] = ()
    length: int = _bounded(1024, 8)
    batch: int = _bounded(4, 1)
    seed: int = _bounded(0, 0, 2**32 - 1)
    overlong: Literal["error", "truncate", "skip"] = "truncate"
    empty: Literal["error", "skip"] = "error"
    epochs: int | None = _bounded(None, 1)


@dataclasses.dataclass(frozen=True)
class CodSection:
    """Conditional drop-token sampling: depth d keeps max(r**d, r_min) of the positions.

    over, room: see `cod.ChainSampling`.
    """

    r: float = _bounded(0.7, 0.0, 1.0)
    r_min: float = _bounded(0.2, 0.0, 1.0)
    over: Literal["answers", "all"] = "answers"
    room: float = _bounded(1.0, 0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class LossSection:
    """Weights of KL(target || draft), cross-entropy and total variation, and of each depth.

    depth_weights: one for each depth; None = `depth_decay`**depth.
    block_size: rows whose logits exist at a time.
    """

    kl: float = _bounded(1.0, 0.0)
    ce: float = _bounded(0.0, 0.0)
    tv: float = _bounded(0.0, 0.0)
    depth_decay: float = _bounded(1.0, 0.0, 1.0)
    depth_weights: tuple[float, ...] | None = _bounded(None, 0.0)
    block_size: int = _bounded(512, 1)


@dataclasses.dataclass(frozen=True)
class OptimizerSection:
    """AdamW or Muon under a learning rate that warms up, then falls to `final` of its peak.

    momentum: Muon's; b1 and b2 are AdamW's.
    """

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = _bounded(1e-3, 0.0)
    warmup_steps: int = _bounded(100, 0)
    schedule: Literal["cosine", "constant"] = "cosine"
    final: float = _bounded(0.1, 0.0, 1.0)
    weight_decay: float = _bounded(0.01, 0.0)
    b1: float = _bounded(0.9, 0.0, 1.0)
    b2: float = _bounded(0.95, 0.0, 1.0)
    momentum: float = _bounded(0.95, 0.0, 1.0)
    clip_norm: float = _bounded(1.0, 0.0)


@dataclasses.dataclass(frozen=True)
class TrainSection:
    """The loop, what of the network is trained, and in which precision.

    steps: None = what `data.epochs` comes to.
    embedding: "frozen" lends the target's table; "mask_row" trains the mask token's row
        alone; "all" trains a table of the drafter's own. None = "mask_row" where there is one.
    head: "frozen" keeps the rows that the run began with.
    dtype: of activations and of the weights as they are used; None = float32 on CPU,
        bfloat16 elsewhere. The trained weights and optimizer state are float32 always.
    segments: p-eagle: pieces that a row is cut into, their gradients accumulated.
    remat: eagle3: compute every pass again backwards instead of keeping its activations.
    """

    steps: int | None = _bounded(None, 1)
    seed: int = _bounded(0, 0, 2**32 - 1)
    embedding: Literal["frozen", "mask_row", "all"] | None = None
    head: Literal["frozen", "all"] = "all"
    dtype: Literal["float32", "bfloat16"] | None = None
    segments: int = _bounded(1, 1)
    remat: bool = False
    log_every: int = _bounded(1, 1)
    tensorboard: bool = True


@dataclasses.dataclass(frozen=True)
class MeshSection:
    """Devices: `data` copies of the weights, each spread over `fsdp`; data None = all devices."""

    data: int | None = _bounded(None, 1)
    fsdp: int = _bounded(1, 1)


@dataclasses.dataclass(frozen=True)
class CheckpointSection:
    """A checkpoint each `every` steps; the last `keep` stay, and the best."""

    every: int = _bounded(200, 1)
    keep: int = _bounded(2, 1)


@dataclasses.dataclass(frozen=True)
class EvalSection:
    """Speculative decoding of held-out prompts each `every` steps; None = never."""

    every: int | None = _bounded(None, 1)
    prompts: str | None = None
    num_prompts: int = _bounded(16, 1)
    max_new_tokens: int = _bounded(64, 1)
    batch_size: int = _bounded(8, 1)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that a run depends on. `model` names the target."""

    model: str = "smollm2"
    drafter: DrafterSection = DrafterSection()
    data: DataSection = DataSection()
    cod: CodSection = CodSection()
    loss: LossSection = LossSection()
    optimizer: OptimizerSection = OptimizerSection()
    train: TrainSection = TrainSection()
    mesh: MeshSection = MeshSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()

    def flat(self) -> dict[str, Any]:
        """Dotted key -> value, unset ones (None) included."""
        return dict(_flatten(dataclasses.asdict(self)))

    def filled(self, other: TrainConfig) -> TrainConfig:
        """This with `other`'s values where it has none."""
        found = other.flat()
        return self.replaced(
            {k: found[k] for k, v in self.flat().items() if v is None and found[k] is not None}
        )

    def replaced(self, changes: Mapping[str, Any]) -> TrainConfig:
        """This with other values under some dotted keys, unchecked."""
        config = self
        for key, value in changes.items():
            section, _, name = key.rpartition(".")
            if section:
                part = dataclasses.replace(getattr(config, section), **{name: value})
                config = dataclasses.replace(config, **{section: part})
            else:
                config = dataclasses.replace(config, **{name: value})
        return config


# What a run that goes on may change; all else makes it another run.
MAY_CHANGE = (
    "train.steps", "train.log_every", "train.tensorboard", "checkpoint.every", "checkpoint.keep",
    "eval.every",
)  # fmt: skip


def load(
    path: Path | None, overrides: Sequence[str] = (), given: Mapping[str, Any] | None = None
) -> TrainConfig:
    """A run's configuration: a TOML file, then `key=value` overrides, then `given` values.

    Args:
        path: None = the defaults.
        overrides: "optimizer.learning_rate=1e-3" and the like; the value as in TOML, its
            quotes dispensable.
        given: dotted keys that options of their own name (`--model`, `--data`).

    Files are made absolute, as seen from the current folder. Raises InputError naming the
    file (or `--set`), the key, what was found and what was expected.
    """
    config = TrainConfig()
    changes: dict[str, Any] = {}
    if path is not None:
        for key, value in _flatten(_read(path)):
            changes[key] = _checked(key, value, str(path))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise InputError(f"--set: found {override!r}, expected key=value")
        changes[key.strip()] = _checked(key.strip(), _toml_value(text.strip()), "--set")
    config = config.replaced({**changes, **(given or {})})
    _check_together(config, str(path or "--set"))
    prompts = config.eval.prompts
    return config.replaced(
        {
            "data.answers": tuple(map(_absolute, config.data.answers)),
            "eval.prompts": None if prompts is None else _absolute(prompts),
        }
    )


def dump(config: TrainConfig) -> str:
    """The configuration as TOML that `load` reads back; unset keys are left out."""
    lines = []
    for key, value in dataclasses.asdict(config).items():
        if isinstance(value, dict):
            lines += ["", f"[{key}]"]
            lines += [f"{k} = {_toml_text(v)}" for k, v in value.items() if v is not None]
        else:
            lines.append(f"{key} = {_toml_text(value)}")
    return "\n".join(lines) + "\n"


def check_same_run(saved: TrainConfig, now: TrainConfig, where: Path) -> None:
    """Raises InputError where `now` differs from the run in more than MAY_CHANGE."""
    began = saved.flat()
    for key, value in now.flat().items():
        if value != began[key] and key not in MAY_CHANGE:
            raise InputError(
                f"{where}: {key}: found {_shown(value)}, expected {_shown(began[key])} as the "
                f"run began with (only {', '.join(MAY_CHANGE)} may change)"
            )


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}, expected a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        detail = " ".join(str(error).split())
        raise InputError(f"{path}: found invalid TOML ({detail})") from None


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _fields() -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """Dotted key -> (type, bounds)."""
    found: dict[str, tuple[Any, Mapping[str, Any]]] = {}
    for name, hint in typing.get_type_hints(TrainConfig).items():
        if dataclasses.is_dataclass(hint):
            hints = typing.get_type_hints(hint)
            for field in dataclasses.fields(hint):
                found[f"{name}.{field.name}"] = (hints[field.name], field.metadata)
        else:
            found[name] = (hint, {})
    return found


def _checked(key: str, value: Any, where: str) -> Any:
    """`value` as the key's field has it. Raises InputError."""
    fields = _fields()
    if key not in fields:
        near = difflib.get_close_matches(key, fields, 1, 0.6)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(fields)}"
        raise InputError(f"{where}: {key}: found no such setting, {hint}")
    kind, bounds = fields[key]
    fitted, expected = _fit(kind, value)
    low, high = bounds.get("low"), bounds.get("high")
    if expected is None:
        numbers = fitted if isinstance(fitted, tuple) else (fitted,)
        if not all(
            (low is None or number >= low) and (high is None or number <= high)
            for number in numbers
            if number is not None and not isinstance(number, str | bool)
        ):
            span = f"{low} or more" if high is None else f"{low} to {high}"
            expected = f"each {span}" if isinstance(fitted, tuple) else span
    if expected is not None:
        raise InputError(f"{where}: {key}: found {_shown(value)}, expected {expected}")
    return fitted


def _fit(kind: Any, value: Any) -> tuple[Any, str | None]:
    """(the value as `kind`, None), or (anything, what was expected)."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        (kind,) = (arg for arg in args if arg is not type(None))
        return _fit(kind, value)
    if origin is Literal:
        return value, None if value in args else f"one of {', '.join(map(repr, args))}"
    if origin is tuple:
        if not isinstance(value, list):
            return value, f"a list of {_NAMES[args[0]]}s"
        fitted = [_fit(args[0], item) for item in value]
        bad = next((expected for _, expected in fitted if expected), None)
        return tuple(item for item, _ in fitted), bad and f"a list of {_NAMES[args[0]]}s"
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value), None
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    finite = not isinstance(value, float) or abs(value) < float("inf")
    return value, None if fits and finite else _article(_NAMES[kind])


_NAMES = {int: "integer", float: "number", str: "string", bool: "boolean (true or false)"}


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _check_together(config: TrainConfig, where: str) -> None:
    """Raises InputError on values that do not go together."""
    loss, depths = config.loss, config.drafter.num_draft_tokens
    if loss.depth_weights is not None and len(loss.depth_weights) != depths:
        raise InputError(
            f"{where}: loss.depth_weights: found {len(loss.depth_weights)} weights, expected "
            f"{depths}, one for each of drafter.num_draft_tokens"
        )
    if loss.kl + loss.ce + loss.tv == 0:
        raise InputError(f"{where}: loss: found kl, ce and tv all 0, expected one above 0")
    if config.optimizer.learning_rate == 0:
        raise InputError(f"{where}: optimizer.learning_rate: found 0, expected more than 0")
    if config.train.steps is None and config.data.epochs is None:
        raise InputError(f"{where}: train.steps: found none, expected it or data.epochs")
    if config.eval.every is not None and config.eval.prompts is None:
        raise InputError(
            f"{where}: eval.prompts: found none, expected a JSON Lines file of held-out prompts, "
            "as eval.every is set"
        )


def _toml_value(text: str) -> Any:
    """A value as TOML has it; what is no TOML is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text


def _toml_text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml_text, value))}]"
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, float) else repr(value)


def _shown(value: Any) -> str:
    return "none" if value is None else _toml_text(value)
