"""Random training programs have the same bits with memswap, by every door and with every action."""

from __future__ import annotations

import random

import pytest
from programs import WAYS, Program, difference, encodes_everything, managed, plain

import memswap

pytestmark = pytest.mark.filterwarnings("ignore")  # programs do what torch warns of


def seeds(device, schedule):
    """Few, for they are many tests in one; other ones under each schedule of a simulated device."""
    if device.type == "cpu":
        return range(10)
    return random.Random(str(schedule)).sample(range(1000), 2)


def test_random_programs_have_the_same_bits(device, new_pool, schedule):
    moved = 0
    pool = new_pool()
    for seed in seeds(device, schedule):
        program = Program(seed, device)
        expected = plain(program)
        for door, action in random.Random(seed).sample(WAYS, 6):
            if not program.suits(door):
                continue
            swaps = action in (memswap.Action.SWAP, memswap.Action.ENCODE_SWAP, "mixed")
            try:
                with encodes_everything():
                    found, stats = managed(program, door, action, pool if swaps else None)
            except memswap.BudgetError:
                continue
            wrong = difference(found, plain(program, door) if door == "regions" else expected)
            assert wrong is None, f"{program}\nby {door} with {action}: {wrong}"
            moved += sum(one.moved_storages for one in stats)
    assert moved > 0
