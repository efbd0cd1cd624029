"""Meshes as text, and which dimension of a weight goes over which axis."""

from __future__ import annotations

import dataclasses
import unittest.mock
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from peagle_jax.decoding import placement
from peagle_jax.errors import InputError
from peagle_jax.mesh_shape import MeshShape
from peagle_jax.models import decoder
from peagle_jax.sharding import (
    TENSOR_RULES,
    by_rows,
    check_heads,
    make_inference_mesh,
    partition_spec,
    partition_specs,
    per_device,
)
from tests.decoding import tiny
from tests.decoding.test_families import GPT_OSS

AXES = ("data", "expert", "model")


def mesh(data: int = 1, expert: int = 1, model: int = 1) -> AbstractMesh:
    return AbstractMesh((data, expert, model), AXES)


@pytest.mark.parametrize(
    ("text", "found", "shown"),
    [
        ("data=2,model=4", MeshShape(2, 1, 4), "data=2,model=4"),
        (" model=3 ", MeshShape(1, 1, 3), "model=3"),
        ("expert=8,data=2,model=1", MeshShape(2, 8, 1), "data=2,expert=8"),
        ("data=1", MeshShape(), "data=1"),
    ],
)
def test_shapes_as_text(text, found, shown) -> None:
    assert MeshShape.parse(text) == found
    assert str(found) == shown
    assert MeshShape.parse(shown) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--mesh: found '' in '', expected axis=devices"),
        ("data", "--mesh: found 'data' in 'data', expected axis=devices"),
        ("data=2,", "--mesh: found '' in 'data=2,'"),
        ("data=0", "--mesh: found 'data=0'"),
        ("model=-1", "--mesh: found 'model=-1'"),
        ("model=2.0", "--mesh: found 'model=2.0'"),
        ("model=²", "--mesh: found 'model=²'"),
        ("data=2,tensor=4", "--mesh: found the axis 'tensor', expected one of data, expert, model"),
        ("data=2,data=2", "--mesh: found data twice in 'data=2,data=2', expected it once"),
    ],
)
def test_text_that_is_no_shape(text, message) -> None:
    with pytest.raises(InputError) as error:
        MeshShape.parse(text)
    assert str(error.value).startswith(message)


def test_a_mesh_takes_the_devices_that_there_are() -> None:
    count = jax.device_count()
    made = make_inference_mesh(MeshShape(data=count))
    assert dict(made.shape) == {"data": count, "expert": 1, "model": 1}
    wanted = MeshShape(data=count, model=3)
    with pytest.raises(InputError, match=f"takes {3 * count} devices, expected {count}, as many"):
        make_inference_mesh(wanted)


def test_the_target_is_split_and_the_drafter_is_not() -> None:
    config = tiny.target_config(block=dataclasses.replace(GPT_OSS, num_heads=4, num_kv_heads=2))
    config = dataclasses.replace(config, vocab_size=24)
    abstract = decoder.abstract_params(config)
    specs = partition_specs(
        decoder.logical_axes(config), abstract, mesh(expert=3, model=2), TENSOR_RULES
    )
    assert specs["embed_tokens"]["embedding"] == P("model", None)
    layer = specs["layers_0"]
    assert layer["self_attn"]["q_proj"] == {"kernel": P("model", None), "bias": P("model")}
    assert layer["self_attn"]["o_proj"] == {"kernel": P(None, "model"), "bias": P(None)}
    assert layer["self_attn"]["sinks"] == P("model")
    assert layer["mlp"]["router"]["kernel"] == P(None, None)
    experts = layer["mlp"]["experts"]
    assert experts["up_proj"] == {
        "kernel": P("expert", "model", None),
        "bias": P("expert", "model"),
    }
    assert experts["down_proj"] == {
        "kernel": P("expert", None, "model"),
        "bias": P("expert", None),
    }
    one = make_inference_mesh(MeshShape(), jax.devices()[:1])
    drafter: Any = tiny.drafter_config(config, parallel=True)
    assert placement.drafter_sharding(drafter, None, one) == NamedSharding(one, P())
    placed = placement.target_shardings(config, abstract, one)
    assert jax.tree.all(jax.tree.map(lambda leaf: leaf.mesh == one, placed))


def test_heads_are_not_cut() -> None:
    # 9 heads of 64 over 2 devices: the weights would divide.
    block = dataclasses.replace(tiny.BLOCK, num_heads=9, num_kv_heads=3, head_dim=64)
    check_heads(block, mesh(data=2, model=3), TENSOR_RULES)
    message = "mesh: model: found 2, expected a divisor of 3, the model's key-value heads"
    with pytest.raises(InputError, match=message):
        check_heads(block, mesh(model=2), TENSOR_RULES)


def test_what_does_not_divide_is_refused() -> None:
    shapes = {"mlp": {"kernel": jax.ShapeDtypeStruct((6, 8), jnp.float32)}}
    axes = {"mlp": {"kernel": P("mlp", "embed")}}
    message = "mesh: model: found 4, expected a divisor of 6, a dimension of mlp.kernel"
    with pytest.raises(InputError, match=message):
        partition_specs(axes, shapes, mesh(model=4), TENSOR_RULES)
    with pytest.raises(InputError, match="rules: found the axis 'model' for mlp"):
        partition_specs(axes, shapes, AbstractMesh((2,), ("data",)), TENSOR_RULES)


def test_rules_that_collide() -> None:
    rules = {**TENSOR_RULES, "embed": "model"}
    with pytest.raises(InputError, match="rules: found 'model' for two dimensions of w, "):
        partition_spec(P("mlp", "embed"), rules, "w")
    assert partition_spec(P(None, "embed"), rules) == P(None, "model")
    with pytest.raises(InputError, match="rules: found none for 'heds', an axis of w, expected"):
        partition_spec(P("heds"), rules, "w")


def test_without_a_mesh_nothing_is_split() -> None:
    assert per_device(jnp.sin, P(), P()) is jnp.sin


def test_by_rows_is_a_layout_on_a_tpu_alone() -> None:
    here = SingleDeviceSharding(jax.devices()[0])
    assert by_rows(2, here) is here
    place = unittest.mock.Mock(spec=SingleDeviceSharding)
    place.device_set = {unittest.mock.Mock(platform="tpu")}
    found: Any = by_rows(3, place)
    assert found.layout.major_to_minor == (0, 1, 2)
    assert found.sharding is place
