"""Expectations: what the last frame of a tensor says about its next one, without a tensor."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from memswap._native import native
from memswap.codec import Shape, dtype_code
from memswap.engine import expectations as module
from memswap.engine.expectations import RETRY_AFTER, Expectations

MEBIBYTE = 1 << 20
BF16, FP32 = dtype_code(torch.bfloat16), dtype_code(torch.float32)
BOOL = dtype_code(torch.bool)
CANONICAL, FAST = 0, 1  # codec.h: memswap_profile
LQ2, FW2 = 1, 3  # docs/format.md section 3


@dataclass
class Report:
    """What an encoder might have found."""

    frame_nbytes: int
    elements: int = MEBIBYTE // 2
    blocks: int = 512
    var_used: int = 0
    overflow_used: int = 0
    zeros: int = 0
    center_sum: int = 512 * 130
    status: int = 0
    shape: int = Shape.DENSE
    modes: dict[int, int] = field(default_factory=lambda: {LQ2: 512})

    def facts(self) -> native.FrameFacts:
        """The same as the encoder's lane hands it on."""
        found = native.FrameFacts()
        for name in ("frame_nbytes", "elements", "blocks", "var_used", "overflow_used", "zeros"):
            setattr(found, name, getattr(self, name))
        found.center_sum, found.status, found.layout = self.center_sum, self.status, self.shape
        found.lq2_blocks, found.fw2_blocks = self.modes.get(LQ2, 0), self.modes.get(FW2, 0)
        return found


def made(most_keys: int = 16384, **options) -> Expectations:
    limits = module.limits()
    limits.most_keys = most_keys
    return Expectations(limits, **options)


def report(known: Expectations, expectation: native.Expectation, found: Report) -> None:
    known.learn(expectation, found.facts())


def width_of(dtype: torch.dtype) -> int:
    """Bytes of an element, as frames count them: of a complex one's parts."""
    return dtype.itemsize // (2 if dtype.is_complex else 1)


def asked(known: Expectations, ordinal=0, nbytes=MEBIBYTE, dtype=torch.bfloat16, unit="layer"):
    return known.of((unit, ordinal, nbytes, dtype))


def learnt(known: Expectations, ratio: float, **options):
    """One encode of the tensor that `asked` asks for, with this result; what was expected."""
    expectation = asked(known)
    report(known, expectation, Report(int(ratio * MEBIBYTE), **options))
    return expectation


def iterations(known: Expectations, number: int) -> None:
    """So much is encoded that there are bytes for trials."""
    for _ in range(number):
        for ordinal in range(100, 164):
            asked(known, ordinal)
        known.begin_iteration()


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.bfloat16, Shape.DENSE),
        (torch.float16, Shape.DENSE),
        (torch.float32, Shape.DENSE),
        (torch.float64, Shape.DENSE),
        (torch.float8_e4m3fn, Shape.DENSE),
        (torch.complex64, Shape.DENSE),
        (torch.bool, Shape.BITS),
        (torch.uint8, Shape.INTS),
        (torch.int64, Shape.INTS),
    ],
)
def test_first_frame_has_the_shape_of_its_dtype_and_a_capacity_that_a_layout_can_have(dtype, shape):
    expectation = made().of(("layer", 0, MEBIBYTE, dtype))
    code = dtype_code(dtype)
    assert expectation.pays and not expectation.trial
    assert (expectation.dtype, expectation.shape) == (code, shape)
    layout = native.frame_layout(code, shape, MEBIBYTE // width_of(dtype))
    assert expectation.var_capacity is not None
    assert 0 <= expectation.var_capacity <= layout.max_var_units


def test_every_torch_dtype_has_a_width_and_a_shape_that_the_format_knows():
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert len(dtypes) > 20
    for dtype in dtypes:
        code = dtype_code(dtype)
        layout = native.frame_layout(code, native.first_layout(code), 4096)
        raw = native.frame_layout(code, Shape.RAW, 4096)
        assert layout.max_nbytes > 0
        assert raw.max_nbytes - raw.fixed_nbytes == 0
        assert abs(raw.fixed_nbytes - 4096 * width_of(dtype)) < 1024, (
            f"{dtype}: width {width_of(dtype)}"
        )


def test_first_dense_frame_gets_one_and_a_half_bits_per_element():
    capacity = asked(made()).var_capacity
    elements = MEBIBYTE // 2
    assert capacity == pytest.approx(elements * 1.5 * 1.1 / 64, rel=0.01)


def test_first_mask_gets_what_a_bitmap_takes_and_the_next_what_was_needed():
    known = made()
    first = known.of(("layer", 0, MEBIBYTE, torch.bool))
    assert first.var_capacity == pytest.approx(MEBIBYTE * 1.1 / 64, rel=0.01)
    worst = native.frame_layout(BOOL, Shape.BITS, MEBIBYTE).max_var_units
    assert first.var_capacity < worst / 7
    used = MEBIBYTE // 1024 * 4  # every block all zeros
    report(known, first, Report(MEBIBYTE // 25, elements=MEBIBYTE, var_used=used))
    assert known.of(("layer", 0, MEBIBYTE, torch.bool)).var_capacity < first.var_capacity / 3


def test_capacity_follows_the_last_frame_with_a_margin():
    known = made()
    learnt(known, 0.67, var_used=5000, overflow_used=1000)
    assert asked(known).var_capacity == pytest.approx(6000 * 1.10, abs=20)
    learnt(known, 0.66, var_used=3000)
    assert asked(known).var_capacity == pytest.approx(3000 * 1.10, abs=20)


def test_capacity_is_never_more_than_the_worst_case():
    known = made()
    worst = native.frame_layout(BF16, Shape.DENSE, MEBIBYTE // 2).max_var_units
    learnt(known, 0.9, var_used=worst)
    assert asked(known).var_capacity == worst


def test_in_host_memory_every_frame_gets_its_worst_case():
    known = made(worst_case=True)
    assert asked(known).var_capacity is None
    learnt(known, 0.67, var_used=5000)
    assert asked(known).var_capacity is None


def test_tensors_are_told_apart_by_unit_place_size_and_dtype():
    known = made()
    learnt(known, 0.67, var_used=100)
    same = asked(known).var_capacity
    assert asked(known, unit="other").var_capacity != same
    assert asked(known, ordinal=1).var_capacity != same
    assert asked(known, dtype=torch.float16).var_capacity != same
    assert asked(known).var_capacity == same


def test_the_same_tensor_in_another_size_starts_from_what_is_known_per_element():
    known = made()
    learnt(known, 0.67, var_used=4000)
    larger = asked(known, nbytes=2 * MEBIBYTE)
    assert larger.var_capacity == pytest.approx(8000 * 1.10, abs=40)
    learnt(known, 0.99)
    assert asked(known, nbytes=4 * MEBIBYTE).pays, "the last size that was seen did shrink"
    known = made()
    learnt(known, 0.99)
    assert not asked(known, nbytes=4 * MEBIBYTE).pays, "no size of it has ever shrunk"


def test_what_does_not_shrink_is_left_alone_and_looked_at_again():
    known = made()
    learnt(known, 0.96)
    answers = [asked(known).pays for _ in range(2 * RETRY_AFTER)]
    assert answers.count(True) == 2, "one look in RETRY_AFTER steps"
    assert not any(answers[: RETRY_AFTER - 1])
    learnt_again = asked(known)
    assert not learnt_again.pays
    retried = next(e for e in iter(lambda: asked(known), None) if e.pays)
    report(known, retried, Report(MEBIBYTE // 2))
    assert all(asked(known).pays for _ in range(2 * RETRY_AFTER)), "it shrinks now"


def test_what_cannot_shrink_is_never_tried():
    known = made()
    tiny = [asked(known, nbytes=512) for _ in range(3 * RETRY_AFTER)]
    assert not any(one.pays for one in tiny), "one block holds more than 256 elements take"
    odd = [asked(known, nbytes=MEBIBYTE + 1) for _ in range(3 * RETRY_AFTER)]
    assert not any(one.pays for one in odd), "bytes that are no elements"
    assert asked(known).pays, "a longer tensor in the same place is another matter"


def test_zeros_turn_a_dense_frame_sparse_and_back():
    known = made()
    learnt(known, 0.67, zeros=MEBIBYTE // 2 // 10)
    assert asked(known).shape == Shape.DENSE
    learnt(known, 0.8, zeros=MEBIBYTE // 4, var_used=9000)
    sparse = asked(known)
    assert sparse.shape == Shape.SPARSE
    bits = 1 + 0.5 * 11.5  # the bitmap, and the survivors
    assert sparse.var_capacity == pytest.approx(MEBIBYTE // 2 * bits * 1.1 / 64, rel=0.01)
    report(known, sparse, Report(MEBIBYTE * 4 // 10, zeros=MEBIBYTE // 4, var_used=40000))
    assert asked(known).shape == Shape.SPARSE
    assert asked(known).var_capacity == pytest.approx(44000, abs=20)
    report(known, asked(known), Report(MEBIBYTE * 7 // 10, zeros=0, var_used=70000))
    assert asked(known).shape == Shape.DENSE


def test_zeros_are_tried_even_where_the_dense_frame_did_not_shrink():
    known = made()
    learnt(known, 1.0, zeros=MEBIBYTE // 4)
    assert asked(known).pays and asked(known).shape == Shape.SPARSE


def test_float32_that_was_bfloat16_is_found_by_a_trial_that_costs_little():
    known = made()
    for _ in range(3):
        expectation = asked(known, dtype=torch.float32)
        assert expectation.shape == Shape.DENSE, "no trial before there are bytes for it"
        report(known, expectation, Report(int(0.83 * MEBIBYTE), elements=MEBIBYTE // 4))
    iterations(known, 1)
    trial = asked(known, dtype=torch.float32)
    assert trial.trial and trial.shape == Shape.UPCAST
    again = known.settled(trial)
    assert again.shape == Shape.DENSE and not again.trial
    report(known, trial, Report(int(0.34 * MEBIBYTE), elements=MEBIBYTE // 4))
    assert asked(known, dtype=torch.float32).shape == Shape.UPCAST
    assert not asked(known, dtype=torch.float32).trial


def test_a_trial_that_failed_changes_nothing_and_is_not_repeated_at_once():
    known = made()
    expectation = asked(known, dtype=torch.float32)
    report(known, expectation, Report(int(0.83 * MEBIBYTE), elements=MEBIBYTE // 4, var_used=900))
    iterations(known, 4)
    trial = asked(known, dtype=torch.float32)
    assert trial.trial
    report(known, trial, Report(MEBIBYTE, elements=MEBIBYTE // 4, var_used=100_000))
    following = [asked(known, dtype=torch.float32) for _ in range(RETRY_AFTER - 2)]
    assert {one.shape for one in following} == {Shape.DENSE}
    assert {one.var_capacity for one in following} <= {1006, 1007}


def test_trials_of_one_iteration_are_a_small_share_of_its_bytes():
    known = made()
    for ordinal in range(64):
        expectation = asked(known, ordinal, dtype=torch.float32)
        report(known, expectation, Report(int(0.83 * MEBIBYTE), elements=MEBIBYTE // 4))
    for _ in range(40):
        known.begin_iteration()
        step = [asked(known, ordinal, dtype=torch.float32) for ordinal in range(64)]
        assert sum(one.trial for one in step) <= 2, "64 MiB allow 2 MiB of trials"


def test_a_constant_of_floats_is_tried_as_integers():
    known = made()
    learnt(known, 0.63, modes={FW2: 512})
    iterations(known, 1)
    trial = asked(known)
    assert trial.trial and trial.shape == Shape.INTS
    report(known, trial, Report(5000))
    assert asked(known).shape == Shape.INTS


def test_one_centre_is_used_on_an_accelerator_while_it_serves():
    known = made()
    learnt(known, 0.67, var_used=5000)
    fast = asked(known)
    assert (fast.profile, fast.center) == (FAST, 130)
    report(known, fast, Report(int(0.672 * MEBIBYTE), var_used=5100))
    fast = asked(known)
    assert (fast.profile, fast.center) == (FAST, 130)
    report(known, fast, Report(int(0.70 * MEBIBYTE), var_used=5900))
    assert asked(known).profile == CANONICAL, "the distribution moved away from the centre"


def test_a_centre_is_looked_at_again():
    known = made()
    learnt(known, 0.67)
    profiles = [asked(known).profile for _ in range(2 * RETRY_AFTER)]
    assert profiles.count(CANONICAL) == 2


@pytest.mark.parametrize("modes", [{LQ2: 100, 2: 412}, {FW2: 512}])
def test_one_centre_is_not_used_where_blocks_are_unlike(modes):
    known = made()
    learnt(known, 0.67, modes=modes)
    assert asked(known).profile == CANONICAL


def test_a_processor_always_uses_the_canonical_profile():
    known = made(worst_case=True)
    learnt(known, 0.67)
    assert asked(known).profile == CANONICAL


def test_in_host_memory_a_sample_chooses_the_first_shape_and_those_after_a_change():
    known = made(worst_case=True)
    first = asked(known)
    assert first.pays and first.shape is None
    report(known, first, Report(MEBIBYTE // 3, shape=Shape.SPARSE, zeros=MEBIBYTE // 4))
    assert asked(known).shape == Shape.SPARSE
    assert learnt(known, 0.34, shape=Shape.SPARSE).shape == Shape.SPARSE  # a little longer
    assert asked(known).shape == Shape.SPARSE
    learnt(known, 0.60, shape=Shape.SPARSE)  # no more the tensor that it was
    assert asked(known).shape is None
    learnt(known, 0.50, shape=Shape.DENSE)
    assert asked(known).shape == Shape.DENSE


def test_in_host_memory_a_sample_chooses_the_shape_anew_now_and_then():
    known = made(worst_case=True)
    asks = [learnt(known, 0.5).shape for _ in range(2 * RETRY_AFTER)]
    assert asks.count(None) == 3
    assert asks[0] is asks[RETRY_AFTER - 1] is asks[2 * RETRY_AFTER - 1] is None


def test_reports_that_say_nothing_are_ignored():
    known = made()
    before = asked(known)
    report(known, before, Report(0, elements=0))
    report(known, before, Report(MEBIBYTE, status=1))
    assert asked(known) == before


def test_memory_is_bounded_and_the_oldest_go_first():
    known = made(most_keys=10)
    learnt(known, 0.67, var_used=100)
    for step in range(1000):  # a mixture of experts: other sizes in every step
        for ordinal in range(1, 5):
            asked(known, ordinal, nbytes=MEBIBYTE + 2048 * step)
        asked(known)
    assert len(known) <= 10
    assert asked(known).var_capacity in (126, 127), "what is used in every step was forgotten"
    forgotten = asked(known, 1, nbytes=MEBIBYTE)
    report(known, forgotten, Report(MEBIBYTE // 2))
    for ordinal in range(20, 40):
        asked(known, ordinal)
    report(known, forgotten, Report(MEBIBYTE // 2))  # of a key that is not there any more
    assert known.settled(forgotten).pays
    assert len(known) <= 10


def test_worth_is_the_bound(monkeypatch):
    monkeypatch.setattr(module, "WORTH", float("inf"))
    known = made()
    assert asked(known, nbytes=512).pays
    learnt(known, 5.0)
    assert asked(known).pays


def test_a_frame_never_gets_more_than_a_plan_has_for_it():
    known = made()
    learnt(known, 0.7, var_used=40_000)
    held = known.sizes(("layer", 0, MEBIBYTE, torch.bfloat16)).held
    for most in (held + 1000, held, held - 80_000):
        found = known.of(("layer", 0, MEBIBYTE, torch.bfloat16), most)
        fixed = native.frame_layout(found.dtype, found.shape, MEBIBYTE // 2).fixed_nbytes
        assert found.pays and fixed + 8 * found.var_capacity <= min(most, held)
    assert not known.of(("layer", 0, MEBIBYTE, torch.bfloat16), 1000).pays


def test_what_is_set_aside_is_the_worst_case_beyond_the_capacity():
    known = made(spare_tiles=1)
    learnt(known, 0.7, var_used=40_000)
    sizes = known.sizes(("layer", 0, MEBIBYTE, torch.bfloat16))
    layout = native.frame_layout(BF16, Shape.DENSE, MEBIBYTE // 2)
    tile = 8 * layout.max_var_units // layout.blocks
    assert sizes.held + sizes.overflow == layout.max_nbytes + 8 * tile


def test_a_key_is_given_whole() -> None:
    with pytest.raises(TypeError):
        made().of(("layer", 0, MEBIBYTE))  # type: ignore[arg-type]
