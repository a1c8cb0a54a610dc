"""memswap's errors are ordinary exceptions."""

from __future__ import annotations

import pickle

import pytest

import memswap
from memswap import errors

pytestmark = pytest.mark.cpu_only

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_of_another_process_arrives(kind: type[memswap.MemswapError]) -> None:
    """A process pool that cannot read an error reports itself broken, and not what happened."""
    given = ("words", 5) if kind is memswap.BudgetError else ("words",)
    error = kind(*given)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind and str(back) == "words"
    assert vars(back) == vars(error)
