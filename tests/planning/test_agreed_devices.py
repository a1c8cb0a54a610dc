"""What ranks agree on under a device budget: a plan that meets it meets each rank's own."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from steps import RATES, stack

from memswap._native import native
from memswap.planning.agreement import Basis, agreed, agreed_terms
from memswap.planning.device import DeviceTerms, StateTerms, plan_for_device
from memswap.planning.replay import replay

SIZES = [400, 300, 500, 200]
MARKS = 2 * len(SIZES)

bytes_beside = st.integers(0, 600)


def terms(nbytes: int, state: StateTerms | None = None) -> DeviceTerms:
    return DeviceTerms(nbytes, weights_bytes=100, gradients_bytes=100, state=state)


@st.composite
def bases(draw: st.DrawFn) -> Basis:
    """One rank's: its own memory, what is on it besides, and its optimizer."""
    extra = tuple(200 + draw(bytes_beside) for _ in range(MARKS))
    sizes = tuple(draw(st.integers(10, 90)) for _ in range(5))
    state = StateTerms(sizes, step_peak_bytes=draw(st.integers(300, 500)), step_state_bytes=100)
    step = replace(stack(SIZES), extra_nbytes=extra)
    return Basis(step, RATES, device=terms(draw(st.integers(1500, 3000)), state))


@settings(max_examples=60)
@given(st.lists(bases(), min_size=2, max_size=4))
def test_a_plan_that_meets_what_was_agreed_meets_each_ranks_own_budget(ranks: list[Basis]) -> None:
    found = agreed(ranks)
    assert found.step is not None and found.device is not None
    workspace = native.WorkspaceRecord(found.step.extra_nbytes, (0,) * MARKS, 0)
    plan = plan_for_device(
        found.step, RATES, "device:any", found.device, workspace, 1, None, (), float("inf")
    )
    if plan.device_peak_bytes > found.device.limit_bytes:
        return  # it cannot be met: that is an error on all ranks
    actions = {index: one.action for index, one in enumerate(plan.storages)}
    for own in ranks:
        assert own.step is not None and own.device is not None and own.device.state is not None
        stays = 0  # each rank has the state of as many of its own parameters stay as fit
        for nbytes in own.device.state.sizes:
            stays += nbytes if stays + nbytes <= plan.state_stays_bytes else 0
        peak = replay(own.step, RATES, actions, plan.limit_bytes).peak_bytes + stays
        assert peak <= own.device.limit_bytes, "forward and backward exceed a rank's own budget"
        in_step = own.device.state.step_peak_bytes + plan.state_stays_bytes
        whole = plan.state_stays_bytes == sum(found.device.state.sizes) if found.device.state else 0
        assert whole or in_step <= own.device.limit_bytes, "the step exceeds a rank's own budget"


def test_what_one_rank_has_more_of_is_room_for_what_it_has_besides() -> None:
    """More memory and as much more that is there: the plan of the others does not suffer."""
    small = Basis(replace(stack(SIZES), extra_nbytes=(300,) * MARKS), RATES, device=terms(2000))
    more = terms(4000).limit_bytes - terms(2000).limit_bytes
    large = Basis(
        replace(stack(SIZES), extra_nbytes=(300 + more,) * MARKS), RATES, device=terms(4000)
    )
    found = agreed([large, small])
    assert found.step is not None and found.device is not None
    assert found.device.nbytes == 2000
    assert found.step.extra_nbytes == (300,) * MARKS


def test_state_is_planned_when_every_rank_knows_its_own() -> None:
    state = StateTerms((10, 20), step_peak_bytes=300, step_state_bytes=10, most_bytes=25)
    other = replace(state, sizes=(30, 5), step_peak_bytes=280, most_bytes=None)
    both = agreed_terms([terms(2000, state), terms(2000, other)]).state
    assert both is not None
    assert both.sizes == (30, 20) and both.step_peak_bytes == 300 and both.most_bytes == 25
    assert agreed_terms([terms(2000, state), terms(2000)]).state is None
    longer = replace(state, sizes=(1, 2, 3))
    assert agreed_terms([terms(2000, state), terms(2000, longer)]).state is None


def test_ranks_with_budgets_of_other_kinds_have_no_plan() -> None:
    step = replace(stack(SIZES), extra_nbytes=(300,) * MARKS)
    assert agreed([Basis(step, RATES, device=terms(2000)), Basis(step, RATES)]).step is None


def test_one_rank_that_is_no_longer_as_it_was_is_heard_by_all() -> None:
    step = stack(SIZES)
    assert agreed([Basis(step, RATES), Basis(step, RATES, again=True)]).again
    assert not agreed([Basis(step, RATES), Basis(step, RATES)]).again
