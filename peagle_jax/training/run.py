"""A run's folder, and everything in it put together for the trainer.

RUN/config.toml   what the run depends on, every choice written out; its presence makes a run
RUN/initial/      the drafter it began with, in vLLM's layout
RUN/checkpoints/  see checkpoints.py
RUN/metrics.jsonl, RUN/tensorboard/, RUN/report.*
RUN/best/         the drafter whose drafts were accepted best
RUN/final/        the drafter at the end, or as it was when a signal ended the run
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax import batching, sharding
from peagle_jax.config import DrafterConfig, ModelConfig, SamplingParams
from peagle_jax.convert.checkpoint import load_drafter, load_target
from peagle_jax.convert.in_memory import write_drafter
from peagle_jax.convert.opening import open_checkpoint, open_config
from peagle_jax.convert.sources import RUN_CONFIG
from peagle_jax.decoding import placement
from peagle_jax.errors import InputError
from peagle_jax.files import lock, replace_file
from peagle_jax.models import decoder as decoder_model
from peagle_jax.models import drafter as drafter_model
from peagle_jax.runner import Pair
from peagle_jax.text import Prompt
from peagle_jax.tokenizer import load_tokenizer
from peagle_jax.training import initial, params, train_config
from peagle_jax.training.answers import tokenizer_sha256
from peagle_jax.training.cod import ChainSampling
from peagle_jax.training.data import DataConfig, TrainingData
from peagle_jax.training.eagle3 import Eagle3Objective
from peagle_jax.training.evaluate import decoded_acceptance
from peagle_jax.training.loss import LossConfig
from peagle_jax.training.p_eagle import PEagleObjective
from peagle_jax.training.params import Params, Split, Trainable
from peagle_jax.training.step import Objective, Problem
from peagle_jax.training.survey import total_answer_counts
from peagle_jax.training.train_config import TrainConfig
from peagle_jax.training.trainer import Evaluation, Hooks, Summary, train
from peagle_jax.training.vocabulary import (
    check_mask_token_id,
    choose_mask_token_id,
    draft_vocabulary,
)

CONFIG, INITIAL = RUN_CONFIG, "initial"


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that is ready to train: see `open_run`."""

    folder: Path
    config: TrainConfig
    target: ModelConfig
    data: TrainingData
    split: Split
    problem: Problem
    pair: Pair
    prompts: tuple[Prompt, ...]

    def train(self, progress: Callable[[int, int], None] | None = None) -> Summary:
        """Trains from where the run is to its end; see `trainer.train`."""
        hooks = Hooks(
            export=self._export,
            documents=self.data.documents_in,
            evaluate=self._evaluate if self.prompts else None,
            progress=progress,
        )
        batches = self.data.batches()
        try:
            return train(self.problem, self.config, self.folder, batches, hooks)
        finally:
            batches.close()

    def describe(self) -> str:
        """One line: the data, and what is trained."""
        counts, data = self.data.counts, self.data

        def size(tree: Params) -> int:
            return sum(
                x.size for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)
            )

        trained = size(self.split.trained)
        line = (
            f"{counts.documents} documents, {counts.tokens} tokens, {counts.answer_tokens} of them "
            f"in answers; {data.num_rows} rows of {data.config.length}, {data.fill:.0%} full; "
            f"{self.split.config.method} drafter, {trained:,} of "
            f"{trained + size(self.split.frozen):,} parameters trained"
        )
        ids = self.split.frozen.get("draft_to_target")
        if ids is not None:
            total = total_answer_counts(data.surveys)
            share = total[np.asarray(ids)].sum() / max(total.sum(), 1)
            line += f"; the draft vocabulary has {share:.1%} of the answers' tokens"
        return line

    def _whole(self, trained: Params, dtype: Any) -> tuple[DrafterConfig, Params]:
        return params.export(
            self.split.config, trained, self.split.frozen, self.problem.target_params, dtype
        )

    def _export(self, trained: Params, folder: Path) -> None:
        config, whole = self._whole(trained, jnp.float32)
        write_drafter(folder, config, whole, self.target.max_positions)

    def _evaluate(self, trained: Params) -> Evaluation:
        begin = time.perf_counter()
        self.pair.drafter, whole = self._whole(trained, jnp.dtype(self.pair.dtype))
        self.pair.params["drafter"] = whole
        settings = self.config.eval
        found = decoded_acceptance(
            self.pair,
            self.prompts,
            num_draft_tokens=self.config.drafter.num_draft_tokens,
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch_size,
        )
        seconds = time.perf_counter() - begin
        return Evaluation(found.acceptance_length, tuple(found.per_position), seconds)


@contextmanager
def open_run(config: TrainConfig, folder: Path, prompts: Sequence[Prompt] = ()) -> Iterator[Run]:
    """Begins the run in `folder`, or takes up the one that is there.

    Whatever can be wrong with configuration, data, target or drafter is found here, before
    anything is compiled. The folder is locked until the context ends.

    Args:
        prompts: held out; `config.eval.num_prompts` of them, evenly spaced, are decoded at
            every evaluation.

    Raises InputError naming the file, the key, what was found and what was expected; also
    where the configuration is not the run's, see `train_config.check_same_run`.
    """
    if jax.process_count() > 1:
        raise InputError(
            f"train: found {jax.process_count()} processes, expected one: a run is trained on the "
            "devices of one host"
        )
    folder = folder.expanduser().absolute()
    saved = _saved_config(folder)
    if saved is not None:
        config = config.filled(saved)
    target = open_config(config.model)
    tokenizer = load_tokenizer(config.model)
    settings = config.data
    data = TrainingData(
        [Path(name) for name in settings.answers],
        DataConfig(
            settings.length, settings.batch, settings.seed, settings.overlong, settings.empty
        ),
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        vocab_size=target.vocab_size,
    )
    chosen = _evenly(prompts, config.eval.num_prompts) if config.eval.every is not None else ()
    limits = [SamplingParams(max_new_tokens=config.eval.max_new_tokens)] * len(chosen)
    batching.make_requests(tokenizer, target, chosen, limits)  # raises on prompts that do not fit
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp)
    resolve = _Resolver(config, target, tokenizer, data)
    drafter = resolve.drafter(folder if saved is not None else None)
    config = resolve.config(drafter)
    if saved is not None:
        train_config.check_same_run(saved, config, folder / CONFIG)
    make_objective(config, drafter, target)  # raises on options that do not go together
    with _locked(folder):
        target, target_params = load_target(
            config.model, config.train.dtype, _target_shardings(mesh)
        )
        if saved is None:
            first = resolve.params(drafter, target_params)
            write_drafter(folder / INITIAL, drafter, first, target.max_positions)
        # Read back even when just written: a run goes on as it began.
        drafter, first = load_drafter(folder / INITIAL, target, "float32")
        trainable = Trainable(config.train.embedding or "frozen", config.train.head)
        split = params.split(drafter, first, target, target_params, trainable)
        objective = make_objective(config, split.config, target)
        replace_file(folder / CONFIG, train_config.dump(config).encode())
        problem = Problem(
            objective,
            split.trained,
            split.frozen,
            target_params,
            drafter_model.logical_axes(split.config),
            decoder_model.logical_axes(target),
        )
        assert config.train.dtype is not None
        pair = Pair(target, None, {"target": target_params}, tokenizer, config.train.dtype)
        yield Run(folder, config, target, data, split, problem, pair, chosen)


def make_objective(config: TrainConfig, drafter: DrafterConfig, target: ModelConfig) -> Objective:
    """What a configuration minimises. Raises InputError on options that its method lacks."""
    c, t = config.loss, config.train
    depths = config.drafter.num_draft_tokens
    weights = c.depth_weights or tuple(c.depth_decay**d for d in range(depths))
    loss = LossConfig(c.kl, c.ce, c.tv, weights, c.block_size)
    dtype = t.dtype or "float32"
    if not drafter.parallel:
        if t.segments != 1:
            raise InputError(f"train.segments: found {t.segments}, expected 1 for eagle3")
        return Eagle3Objective(drafter, target, depths, loss, dtype, t.remat)
    if t.remat:
        raise InputError("train.remat: found true, expected false for p-eagle: use train.segments")
    cod = config.cod
    sampling = ChainSampling(depths, cod.r, cod.r_min, cod.over, cod.room, t.segments)
    sampling.segment_length(config.data.length)
    return PEagleObjective(drafter, target, sampling, loss, dtype)


class _Resolver:
    """The choices that a configuration leaves open."""

    def __init__(
        self, config: TrainConfig, target: ModelConfig, tokenizer: Any, data: TrainingData
    ) -> None:
        self._config = config
        self._target = target
        self._tokenizer = tokenizer
        self._data = data
        self._previous: Params | None = None
        self._ids: np.ndarray | None = None

    def drafter(self, begun: Path | None) -> DrafterConfig:
        """The drafter's configuration: the one the run began with, one to go on from, or new."""
        section, target = self._config.drafter, self._target
        if begun is not None:
            found = open_checkpoint(begun / INITIAL, "drafter", target).config
            assert isinstance(found, DrafterConfig)
            return found
        if initial.is_path(section.init):
            found, self._previous = initial.load_previous(section.init, section, target)
        else:
            if section.init == initial.RANDOM and self._config.train.head == "frozen":
                raise InputError("train.head: found frozen, expected all with a random init")
            found = initial.new_drafter_config(section, target, self._mask_token_id())
            self._ids = self._draft_to_target(found)
        if found.mask_token_id is not None:
            check_mask_token_id(found.mask_token_id, *self._text())
        return found

    def config(self, drafter: DrafterConfig) -> TrainConfig:
        """The configuration with every choice written out."""
        config, given = self._config, self._config.drafter
        changes = {
            f"drafter.{key}": value
            for key, value in initial.shape_of(drafter).items()
            if getattr(given, key) is None
        }
        if config.train.dtype is None:
            cpu = jax.default_backend() == "cpu"
            changes["train.dtype"] = "float32" if cpu else "bfloat16"
        if config.train.embedding is None:
            changes["train.embedding"] = "mask_row" if drafter.parallel else "frozen"
        epochs = config.data.epochs
        if epochs is not None:
            most = epochs * self._data.batches_per_epoch
            changes["train.steps"] = min(config.train.steps or most, most)
        return config.replaced(changes)

    def params(self, drafter: DrafterConfig, target_params: Params) -> Params:
        """The parameters that the run begins with, float32."""
        if self._previous is not None:
            return self._previous
        return initial.new_params(
            drafter,
            self._target,
            target_params,
            self._ids,
            self._config.drafter.init,
            self._config.train.seed,
        )

    def _draft_to_target(self, drafter: DrafterConfig) -> np.ndarray | None:
        if drafter.draft_vocab_size == drafter.vocab_size:
            return None
        return draft_vocabulary(
            total_answer_counts(self._data.surveys),
            drafter.draft_vocab_size,
            self._target.eos_token_ids,
            () if drafter.mask_token_id is None else (drafter.mask_token_id,),
        ).draft_to_target

    def _mask_token_id(self) -> int | None:
        section = self._config.drafter
        if section.method == "eagle3" or section.mask_token_id is not None:
            return section.mask_token_id
        return choose_mask_token_id(*self._text())

    def _text(self) -> tuple[Any, Any, int, tuple[int, ...]]:
        target = self._target
        return self._tokenizer, self._data.surveys, target.vocab_size, target.eos_token_ids


def _saved_config(folder: Path) -> TrainConfig | None:
    """The configuration of the run in a folder; None where one can begin."""
    if (folder / CONFIG).exists():
        return train_config.load(folder / CONFIG)
    if folder.exists():
        if not folder.is_dir():
            raise InputError(f"{folder}: found a file, expected a folder for the run")
        own = {INITIAL, _LOCK}  # what a run that was ended at once leaves
        if any(path.name not in own and INITIAL not in path.name for path in folder.iterdir()):
            raise InputError(
                f"{folder}: found files and no {CONFIG}, expected a new folder or a run's"
            )
    return None


_LOCK = ".lock"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Makes the folder, and keeps other processes from training in it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as file:
        if not lock(file.fileno()):
            raise InputError(
                f"{folder}: found another process training here, expected one at a time"
            )
        yield


def _target_shardings(mesh: Any) -> Callable[[ModelConfig, Any], Any]:
    return lambda config, abstract: placement.target_shardings(
        config, abstract, mesh, sharding.FSDP_RULES
    )


def _evenly(prompts: Sequence[Prompt], count: int) -> tuple[Prompt, ...]:
    """`count` prompts spread over the whole list, all where there are fewer."""
    count = min(count, len(prompts))
    return tuple(prompts[index * len(prompts) // count] for index in range(count))
