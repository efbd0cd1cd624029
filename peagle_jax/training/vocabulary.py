"""What is decided from the tokens of the training text: draft vocabulary and mask token.

The draft vocabulary (EAGLE-3, arXiv 2503.01840) makes the drafter's head small: the tokens that
the target writes most. The mask token (P-EAGLE, arXiv 2602.01469) stands where the drafter does
not know a token yet; its embedding is trained to say so, which a token that text or chat
template uses would contradict.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from peagle_jax.errors import InputError
from peagle_jax.training.survey import Survey

# Names of tokens that a tokenizer keeps free: best suited for a mask.
_FREE_NAMES = re.compile("reserved|unused|extra|placeholder|dummy", re.IGNORECASE)
_ROLES = ("bos", "eos", "unk", "pad", "sep", "cls")


@dataclasses.dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """The tokens that a drafter can propose.

    draft_to_target: int32, the target's id of every draft id, ascending.
    coverage: the share of the answers' tokens that are among them, from 0 to 1.
    """

    draft_to_target: Int[np.ndarray, "draft_vocab"]
    coverage: float


def draft_vocabulary(
    answer_counts: Int[np.ndarray, "vocab"],
    size: int,
    eos_token_ids: Sequence[int] = (),
    excluded: Sequence[int] = (),
) -> DraftVocabulary:
    """The `size` most frequent tokens of the answers; of equal ones those of lower ids.

    Args:
        answer_counts: how often the answers hold every token of the target's vocabulary.
        size: tokens to take; where the answers hold fewer, unused ones of low ids are added.
        eos_token_ids: always taken: what a drafter cannot propose ends no draft.
        excluded: never taken, as the mask token, which is no token to propose.

    Raises InputError where `size` has no room for the first or does not leave out the second.
    """
    vocab_size = len(answer_counts)
    for name, ids in (("eos token id", eos_token_ids), ("excluded token id", excluded)):
        for one in ids:
            if not 0 <= one < vocab_size:
                raise InputError(f"{name}: found {one}, expected one below {vocab_size}")
    both = set(eos_token_ids) & set(excluded)
    if both:
        raise InputError(f"mask token id: found {min(both)}, expected one that ends no answer")
    least, most = max(1, len(set(eos_token_ids))), vocab_size - len(set(excluded))
    if size == vocab_size:
        excluded, most = (), vocab_size  # the whole vocabulary: draft ids are the target's
    if not least <= size <= most:
        raise InputError(f"draft_vocab_size: found {size}, expected {least} to {most}")
    rank = answer_counts.astype(np.int64)
    rank[list(eos_token_ids)] = np.iinfo(np.int64).max
    rank[list(excluded)] = -1
    most_frequent = np.argsort(-rank, kind="stable")[:size]
    total = int(answer_counts.sum())
    inside = int(answer_counts[most_frequent].sum())
    return DraftVocabulary(
        draft_to_target=np.sort(most_frequent).astype(np.int32),
        coverage=inside / total if total else 0.0,
    )


def choose_mask_token_id(
    tokenizer: Any,
    surveys: Sequence[Survey],
    vocab_size: int,
    eos_token_ids: Sequence[int] = (),
) -> int:
    """A token id to stand for tokens not known yet: one that no text holds.

    It is the first of these that nothing speaks against (`check_mask_token_id`): special
    tokens whose names say that they are free, ids of the target's vocabulary that stand for
    no token, other special tokens. Ordinary tokens are never chosen, as a prompt may hold
    them later. Raises InputError where there is none.
    """
    for candidate in _candidates(tokenizer, vocab_size):
        if _objection(candidate, tokenizer, surveys, vocab_size, eos_token_ids) is None:
            return candidate
    raise InputError(
        "mask token id: found no special token that text and chat template leave unused, "
        "expected one; name the id of a token that no prompt will hold"
    )


def check_mask_token_id(
    mask_token_id: int,
    tokenizer: Any,
    surveys: Sequence[Survey],
    vocab_size: int,
    eos_token_ids: Sequence[int] = (),
) -> None:
    """Raises InputError where a mask token id cannot serve.

    It must be in the vocabulary; occur in no prompt or answer that was surveyed; and be
    neither used by the chat template nor the tokenizer's token for a part (begin, end,
    padding, ..), nor one that ends an answer.
    """
    objection = _objection(mask_token_id, tokenizer, surveys, vocab_size, eos_token_ids)
    if objection is not None:
        raise InputError(objection)


def _objection(
    token_id: int,
    tokenizer: Any,
    surveys: Sequence[Survey],
    vocab_size: int,
    eos_token_ids: Sequence[int],
) -> str | None:
    """What speaks against a mask token, as an error's message."""
    if not 0 <= token_id < vocab_size:
        return f"mask token id: found {token_id}, expected one below the vocabulary's {vocab_size}"
    for survey in surveys:
        count = survey.occurrences(token_id)
        if count:
            return (
                f"{survey.path}: mask token id: found {token_id} {count} times in the text, "
                "expected a token that never occurs"
            )
    if token_id in eos_token_ids:
        return f"mask token id: found {token_id}, which ends answers, expected an unused token"
    for role in _ROLES:
        if getattr(tokenizer, f"{role}_token_id", None) == token_id:
            return (
                f"mask token id: found {token_id}, the tokenizer's {role} token, expected an "
                "unused token"
            )
    token = tokenizer.added_tokens_decoder.get(token_id)
    if token is not None and str(token) in _template_text(tokenizer):
        return (
            f"mask token id: found {token_id}, {str(token)!r}, which the chat template uses, "
            "expected an unused token"
        )
    return None


def _candidates(tokenizer: Any, vocab_size: int) -> Iterator[int]:
    special = {
        index: str(token)
        for index, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special
    }
    yield from (index for index, name in special.items() if _FREE_NAMES.search(name))
    known = set(tokenizer.get_vocab().values())
    yield from (index for index in range(vocab_size) if index not in known)
    yield from (index for index, name in special.items() if not _FREE_NAMES.search(name))


def _template_text(tokenizer: Any) -> str:
    """All chat templates of a tokenizer: it has none, one, or some by name."""
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""
