"""A loader with workers that keeps its own place, as torchdata 0.11's StatefulDataLoader does, without torchdata.

What matters of it, step by step: an iterator over the sampler is made before a state is loaded; the sampler is loaded,
a new iterator made, and that loaded, each where it has both methods; a sampler that has them nowhere is wound forward.
The first state is asked for before anything is drawn, and then one whenever a batch is drawn, ahead of the script; the
state of the loader is that of the batch which the script was given last, or of now where nothing is fetched ahead.
"""

from __future__ import annotations

import itertools
from collections import deque

INDEX_SAMPLER, SAMPLER_ITER, YIELDED = "_index_sampler_state", "_sampler_iter_state", "_sampler_iter_yielded"


def is_stateful(thing):
    return all(hasattr(thing, name) for name in ("state_dict", "load_state_dict"))


def asked(thing):
    return thing.state_dict() if is_stateful(thing) else None


class StatefulLoader:
    """Gives the indices of batches; `ahead` are fetched before the script gets the first (2 workers fetch 4)."""

    def __init__(self, batch_sampler, *, ahead):
        self.batch_sampler, self.ahead = batch_sampler, ahead
        self._held, self._iterator = None, None

    def __len__(self):
        return len(self.batch_sampler)

    def __iter__(self):
        self._iterator = _Pass(self, self._held)
        self._held = None
        if self._iterator.finished:
            self._iterator = _Pass(self, None)
        return self._iterator

    def state_dict(self):
        return self._iterator.state_dict()

    def load_state_dict(self, state):
        self._held = state


class _Pass:
    def __init__(self, loader, held):
        self._sampler, self._ahead, self.finished = loader.batch_sampler, loader.ahead, False
        self._batches, self._drawn, self._fetched = iter(self._sampler), 0, deque()
        if held is not None:
            self._restore(held)
        if self._ahead:
            self._snapshot = self._place()
            for _ in range(self._ahead):
                self._fetch()

    def _restore(self, held):
        self._drawn, self.finished = held[YIELDED], held["finished"]
        if is_stateful(self._sampler) or is_stateful(self._batches):
            if is_stateful(self._sampler):
                self._sampler.load_state_dict(held[INDEX_SAMPLER])
            self._batches = iter(self._sampler)
            if held[SAMPLER_ITER] is not None and is_stateful(self._batches):
                self._batches.load_state_dict(held[SAMPLER_ITER])
        else:
            self._batches = itertools.islice(self._sampler, self._drawn, None)

    def _place(self):
        return {
            SAMPLER_ITER: asked(self._batches),
            INDEX_SAMPLER: asked(self._sampler),
            YIELDED: self._drawn,
            "finished": self.finished,
        }

    def _fetch(self):
        try:
            batch = next(self._batches)
        except StopIteration:
            return
        self._drawn += 1
        self._fetched.append((batch, self._place()))

    def __iter__(self):
        return self

    def __next__(self):
        if not self._ahead:
            try:
                batch = next(self._batches)
            except StopIteration:
                self.finished = True
                raise
            self._drawn += 1
            return batch
        if not self._fetched:
            self.finished = True
            raise StopIteration
        batch, place = self._fetched.popleft()
        self._fetch()
        self._snapshot = place
        return batch

    def state_dict(self):
        return (self._snapshot if self._ahead else self._place()) | {"finished": self.finished}
