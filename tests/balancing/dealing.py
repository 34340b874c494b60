"""Ranks that share batches, in one process: their samplers, their loaders' prefetching, and changes of shares."""

from __future__ import annotations

import threading

from paceline.drivers.balancing.passes import BatchPass
from paceline.drivers.balancing.sampler import BalancedBatches
from paceline.drivers.balancing.schedule import ShareSchedule


class DealingRank:
    """What a sampler asks of a Balance; all ranks are told of changes by the test."""

    def __init__(self, rank, shares, *, least=1):
        self.rank, self.ranks, self.batch_size, self.least = rank, len(shares), sum(shares), least
        self.schedule = ShareSchedule(shares, least=least)
        self.next_pass, self.current = 0, None

    def check_samples(self, samples, *, drop_last):
        pass

    def deal(self, place, samples):
        return self.schedule.deal(place, samples, rank=self.rank)

    def begin_pass(self, take, steps, facts, *, first=0):
        self.schedule.forget((self.next_pass, 0))
        self.current = BatchPass(take, number=self.next_pass, steps=steps, lock=threading.RLock(), first=first)
        return self.current


class Loader:
    """A loader that fetches `ahead` batches ahead, as a DataLoader with workers does."""

    def __init__(self, rank, sampler, ahead):
        self.rank, self.batches, self.waiting, self.ahead = rank, iter(sampler), [], ahead
        for _ in range(ahead):
            self._fetch()

    def _fetch(self):
        batch = next(self.batches, None)
        if batch is not None:
            self.waiting.append(batch)

    def next(self):
        """Take the next batch and train it; return its real samples and its weight, None at the end."""
        self._fetch()
        if not self.waiting:
            return None
        batch, current = self.waiting.pop(0), self.rank.current
        current.begin_forward()
        dealt = current.dealt
        current.end_backward()
        self.rank.next_pass = current.number + 1
        assert len(batch) == (dealt.samples or self.rank.least)
        return batch if dealt.samples else [], dealt


def samplers_of(ranks, samples, **settings):
    return [BalancedBatches(rank, samples, **settings) for rank in ranks]
