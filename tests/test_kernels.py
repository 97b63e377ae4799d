"""Kernels against the eager code that says what they compute, and that against float64."""

from __future__ import annotations

import gc

import torch

from eachgrad.kernels import signals


def test_a_signal_is_an_op():
    torch.library.opcheck(torch.ops.eachgrad.signal.default, (torch.tensor(True), [torch.randn(3), torch.rand(2)], 0))


def test_flags_reach_the_host():
    slots = [signals.Slot() for _ in range(3)]
    for flags in ((True, False, True), (False, False, True)):
        for slot in slots:
            slot.clear()
        for flag, slot in zip(flags, slots, strict=True):
            through = torch.randn(3)
            settled, (passed,) = signals.signal(torch.tensor(flag), [through], slot)
            assert bool(settled) is flag
            assert torch.equal(passed, through)
        assert [slot.wait() for slot in slots] == list(flags)


def test_a_key_that_is_free_is_given_again():
    """So that a graph made anew is the same one; two that are there never share a key."""
    slots = [signals.Slot() for _ in range(3)]
    keys = [slot.key for slot in slots]
    assert len(set(keys)) == 3
    del slots[1]
    gc.collect()
    again = signals.Slot()
    assert again.key == keys[1]
    assert signals.Slot().key not in (keys[0], keys[2], again.key)
    again.clear()
    signals.signal(torch.tensor(True), [], again)
    assert again.wait()


def test_a_flag_that_does_not_come_counts_as_raised():
    slot = signals.Slot()
    slot.clear()
    signals.signal(torch.tensor(False), [], slot)
    assert slot.wait() is False
    slot.clear()
    assert slot.wait() is True
    torch.ops.eachgrad.signal(torch.tensor(False), [], 10**9)  # nobody listens
