"""Random training programs have the same bits with memswap, by every door and with every action."""

from __future__ import annotations

import random

import pytest
from programs import RECOMPUTING, WAYS, Program, examined, plain

pytestmark = pytest.mark.filterwarnings("ignore")  # programs do what torch warns of


def moved_by(seeds, device, new_pool):
    """How many storages moved; each program must be right by each of a few ways."""
    moved = 0
    for seed in seeds:
        program = Program(seed, device)
        expected = plain(program)
        choose = random.Random(seed)
        for door, action in [*choose.sample(WAYS, 6), choose.choice(RECOMPUTING)]:
            if program.suits(door):
                wrong, storages = examined(program, door, action, expected, new_pool)
                assert wrong is None, f"{program}\nby {door} with {action}: {wrong}"
                moved += storages
    return moved


def test_random_programs_have_the_same_bits(device, new_pool, schedule):
    """Few, for they are many tests in one; other ones under each schedule of a simulated device."""
    seeds = range(10) if schedule is None else random.Random(str(schedule)).sample(range(1000), 6)
    assert moved_by(seeds, device, new_pool) > 0


@pytest.mark.slow
def test_many_random_programs_have_the_same_bits(device, new_pool, schedule):
    first = random.Random(str(schedule)).randrange(10_000, 1_000_000)
    assert moved_by(range(first, first + 60), device, new_pool) > 0
