#!/usr/bin/env python3
"""Writes a checkpoint of random values that is as large as asked, to try conversion on.

    scripts/make_large_checkpoint.py OUT --style gpt-oss --bytes 8GiB

Names, shapes, dtypes and config.json are the release's own; only the number of layers is cut
(or grown) to come near the size. The files are real safetensors in shards.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from peagle_jax.convert import releases, synthetic
from peagle_jax.convert.releases import Release
from peagle_jax.errors import InputError

STYLES = {"gpt-oss": "openai/gpt-oss-20b", "qwen3-moe": "Qwen/Qwen3-Coder-30B-A3B-Instruct"}
UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "": 1}


def size(text: str) -> int:
    """Bytes of "8GiB", "512MiB" or "1000000"."""
    unit = next(unit for unit in UNITS if text.endswith(unit))
    return int(float(text.removesuffix(unit)) * UNITS[unit])


def setting(text: str) -> tuple[str, int]:
    """A config key and its value, of "hidden_size=64"."""
    key, _, value = text.partition("=")
    return key, int(value)


def with_layers(release: Release, layers: int) -> Release:
    """The release at another depth, its layer types going on as they began."""
    types = release.config.get("layer_types")
    if types is None:
        return release.scaled(num_hidden_layers=layers)
    # In one step: types are cut to the layers that there are.
    longer = types * (layers // len(types) + 1)
    return release.scaled(num_hidden_layers=layers, layer_types=longer)


def total(release: Release) -> int:
    """Bytes of all tensors."""
    return sum(map(synthetic.tensor_bytes, release.tensors().values()))


def near(release: Release, wanted: int) -> Release:
    """The release with as many layers as come nearest to `wanted` bytes, one at least."""
    one, two = (total(with_layers(release, layers)) for layers in (1, 2))
    return with_layers(release, max(1, 1 + round((wanted - one) / (two - one))))


def main() -> int:
    """Writes the checkpoint and prints what it is."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    parser.add_argument("--style", choices=STYLES, default="gpt-oss", help="(%(default)s)")
    parser.add_argument("--bytes", type=size, default="8GiB", help="of all tensors (%(default)s)")
    parser.add_argument("--shard-bytes", type=size, default="4GiB", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument(
        "--set",
        type=setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another value of config.json, such as hidden_size=64 (repeatable)",
    )
    args = parser.parse_args()
    if args.out.exists() and any(args.out.iterdir()):
        raise InputError(f"{args.out}: found a folder that is not empty, expected a new one")
    release = releases.find(STYLES[args.style])
    assert release is not None
    release = near(release.scaled(**dict(args.set)), args.bytes)
    synthetic.write_release(args.out, release, args.seed, args.shard_bytes)
    layers = release.config["num_hidden_layers"]
    print(f"{args.out}: {args.style}, {layers} layers, {total(release):,} bytes of tensors")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"make_large_checkpoint: error: {error}")
