"""What every kernel must pass, on every backend: one class, filled in by each kernel's cases."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.target import NATIVE, Implementation, Target, compile_for

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "int32": 0.0, "bool": 0.0}
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
PLATFORMS = {implementation: platform for platform, implementation in NATIVE.items()}


@dataclass(frozen=True)
class Call:
    """A call of a kernel's public function.

    Attributes:
      function: the public function; takes everything below by keyword, and `implementation`.
      arrays: what is traced, poisoned where it must not be looked at.
      clean: the arrays that hold poison, without it: for the reference.
      static: the other arguments.
      tuned: arguments of one implementation, such as small block sizes.
    """

    function: Callable[..., Any]
    arrays: Mapping[str, Any]
    clean: Mapping[str, Any] = field(default_factory=dict)
    static: Mapping[str, Any] = field(default_factory=dict)
    tuned: Mapping[Implementation, Mapping[str, Any]] = field(default_factory=dict)

    def expected(self) -> Any:
        """What the reference makes of the clean arrays."""
        arrays = {**self.arrays, **self.clean}
        return self.function(**arrays, **self.static, implementation="reference")

    def bound(self, implementation: Implementation) -> Callable[..., Any]:
        """The function of the arrays alone."""
        tuned = self.tuned.get(implementation, {})
        return functools.partial(
            self.function, **self.static, **tuned, implementation=implementation
        )

    def interpreted(self, implementation: Implementation, interpret: Any = True) -> Any:
        """What the kernel makes of the poisoned arrays in interpret mode."""
        target = Target(PLATFORMS[implementation], interpret=interpret)
        with compile_for(target):
            return self.program(implementation)(dict(self.arrays))

    def program(self, implementation: Implementation) -> Callable[..., Any]:
        """The function of a dict of arrays, compiled quickly: interpreted kernels compile for
        longer than they run."""
        bound = self.bound(implementation)
        return jax.jit(lambda arrays: bound(**arrays), compiler_options=QUICK)


@dataclass(frozen=True)
class Case:
    """A shape of a kernel, listed once for every backend and dtype."""

    name: str
    build: Callable[[np.random.Generator, Any], Call]
    dtypes: tuple[Any, ...] = (jnp.float32, jnp.bfloat16)
    races: bool = False  # look for races too: slow

    def call(self, dtype: Any) -> Call:
        seed = zlib.crc32(self.name.encode())
        return self.build(np.random.default_rng(seed), dtype)


def assert_close(got: Any, want: Any) -> None:
    """Every leaf within the tolerance of its dtype; NaN is never close."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype
        tolerance = TOLERANCE[one.dtype.name]
        np.testing.assert_allclose(
            np.asarray(one, np.float64), np.asarray(other, np.float64), tolerance, tolerance
        )


class KernelContract:
    """Inherit, set CASES and IMPLEMENTATIONS, and add what only that kernel promises."""

    IMPLEMENTATIONS: ClassVar[Sequence[Implementation]] = ("pallas_tpu", "pallas_gpu")
    CASES: ClassVar[Sequence[Case]]

    def pytest_generate_tests(self, metafunc: Any) -> None:
        names = metafunc.fixturenames
        if "implementation" in names:
            metafunc.parametrize("implementation", self.IMPLEMENTATIONS)
        if "case_dtype" in names:
            pairs = [(case, dtype) for case in self.CASES for dtype in case.dtypes]
            ids = [f"{case.name}-{jnp.dtype(dtype).name}" for case, dtype in pairs]
            metafunc.parametrize("case_dtype", pairs, ids=ids)
        if "case" in names:
            metafunc.parametrize("case", self.CASES, ids=[case.name for case in self.CASES])
        if "racing" in names:
            racing = [case for case in self.CASES if case.races]
            metafunc.parametrize("racing", racing, ids=[case.name for case in racing])

    def test_equals_the_reference(self, implementation, case_dtype):
        case, dtype = case_dtype
        call = case.call(dtype)
        assert_close(call.interpreted(implementation), call.expected())

    def test_copies_do_not_race(self, racing):
        """TPU memories, copies that land only when awaited, and a race detector."""
        call = racing.call(racing.dtypes[0])
        with reset_interpreter():
            got = call.interpreted("pallas_tpu", pltpu.InterpretParams(detect_races=True))
            assert_close(got, call.expected())
            assert not races_found()

    # From jax 0.12 on; docs/kernels.md says what follows.
    @pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
    def test_lowers_for_cuda(self, case):
        call = case.call(case.dtypes[-1])
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), dict(call.arrays))
        with compile_for(Target("gpu", "NVIDIA H200", 132)):
            function = jax.jit(lambda arrays: call.bound("pallas_gpu")(**arrays))
            lowered = function.trace(shapes).lower(lowering_platforms=("cuda",))
        assert "__gpu$xla.gpu.triton" in lowered.as_text()

    def test_an_explicit_choice_is_never_replaced(self, implementation):
        """On a CPU, without interpretation, a device's kernel is refused."""
        call = self.CASES[0].call(jnp.float32)
        with pytest.raises(NotImplementedError, match="runs on platform"):
            call.bound(implementation)(**call.arrays)

    def test_an_unknown_implementation_is_refused(self):
        call = self.CASES[0].call(jnp.float32)
        with (
            unchecked(),
            pytest.raises(NotImplementedError, match="'pallas_metal' is not available"),
        ):
            call.function(**call.arrays, **call.static, implementation="pallas_metal")

    def test_the_platform_chooses_where_nothing_is_said(self):
        call = self.CASES[0].call(jnp.float32)
        arrays = dict(call.arrays)

        def program(target: Target) -> str:
            with compile_for(target):
                made = jax.make_jaxpr(lambda arrays: call.function(**arrays, **call.static))
                return str(made(arrays))

        assert "pallas_call" not in program(Target("cpu"))
        assert "pallas_call" in program(Target("tpu"))
        assert "pallas_call" in program(Target("gpu"))


class reset_interpreter:  # used as a context manager's name
    """Fresh simulated memories, before and after."""

    def __enter__(self) -> None:
        pltpu.reset_tpu_interpret_mode_state()

    def __exit__(self, *_: object) -> None:
        pltpu.reset_tpu_interpret_mode_state()


def races_found() -> bool:
    """Whether the last interpreted kernel raced."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    state = interpreter.races
    return state is not None and bool(state.races_found)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Without the run-time check of annotations, which would refuse first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def parents(rng: np.random.Generator, rows: int) -> Iterator[int]:
    """A random tree's parent of each row, -1 for the root."""
    yield -1
    for row in range(1, rows):
        yield int(rng.integers(0, row))
