"""The GEMM floor: how many operations a token takes, and what the processor can do."""

import dataclasses

import pytest

from gristmill_testing import engine_bounds
from gristmill_testing.products import (
    Products,
    Shape,
    instructions,
    measure_products,
    processor_name,
)
from gristmill_testing.verdicts import Bound

SMOLLM2 = Shape(
    hidden=576, inner=1536, layers=30, heads=9, kv_heads=3, head_dim=64, vocabulary=49_152
)
SMALL = dataclasses.replace(SMOLLM2, hidden=16, inner=32, layers=2, heads=2, kv_heads=1, head_dim=8, vocabulary=64)  # fmt: skip
CPUINFO = """processor\t: 0
model name\t: AMD EPYC 9000
flags\t\t: fpu avx2 avx512f avx512_bf16 rdtscp
"""


def test_smollm2_has_the_operations_that_were_reckoned_by_hand() -> None:
    assert SMOLLM2.weights == pytest.approx(134.48e6, rel=1e-4)
    assert SMOLLM2.lora_weights(16) == pytest.approx(4.884e6, rel=1e-3)
    assert SMOLLM2.training_flops(256, 16) == pytest.approx(594e6, rel=2e-3)


def test_a_longer_sequence_costs_more_for_each_token() -> None:
    more = SMOLLM2.training_flops(512, 16) - SMOLLM2.training_flops(256, 16)
    assert more == 6 * 256 * 576 * 30


def test_the_floor_is_the_operations_at_the_speed_of_their_kind() -> None:
    products = Products(bf16=400.0, fp32=100.0, rows=8)
    assert products.ratio == 4.0
    assert products.floor_s(800, "bfloat16") == 2.0
    assert products.floor_s(800, "float32") == 8.0


def test_of_two_measurements_the_faster_of_each_kind_is_the_floor() -> None:
    before, behind = (Products(bf16=b, fp32=f, rows=8) for b, f in ((400.0, 90.0), (300.0, 100.0)))
    assert (
        before.faster(behind) == behind.faster(before) == Products(bf16=400.0, fp32=100.0, rows=8)
    )


def test_products_of_both_kinds_are_measured() -> None:
    products = measure_products(SMALL, rows=8, turns=1)
    assert products.bf16 > 0
    assert products.fp32 > 0


def test_instructions_are_read_from_cpuinfo() -> None:
    assert instructions(CPUINFO) == ("avx512_bf16", "avx512f", "avx2")
    assert instructions("flags : fpu avx2_like\n") == ()
    assert instructions("") == ()
    assert processor_name(CPUINFO) == "AMD EPYC 9000"


def bound_of(ratio: float, what: str) -> Bound:
    [found] = [
        each
        for each in engine_bounds.bounds(ratio)
        if (each.row, each.what) == ("training 4x256 bf16", what)
    ]
    return found


@pytest.mark.parametrize(("ratio", "aims"), [(3.99, (1.4, 1.6)), (4.0, (1.65, 2.0))])
def test_more_is_asked_of_bf16_where_it_is_four_times_as_fast(
    ratio: float, aims: tuple[float, float]
) -> None:
    peft = bound_of(ratio, "x PEFT")
    assert (peft.floor, peft.goal) == aims
    best = bound_of(ratio, "x best peer")
    assert (best.floor, best.goal) == (1.3, 1.5)


def test_no_goal_is_easier_than_its_floor() -> None:
    for each in engine_bounds.bounds(2.0):
        if each.floor is not None and each.goal is not None:
            assert (each.goal < each.floor) == each.at_most, each
