"""The example of paceline.watch."""

from __future__ import annotations

import re

from tests.examples.scripts import run


def test_the_example_shows_who_is_slow():
    texts = run("watch_ddp.py", "--epochs", "1", "--delay", "0.1", ranks=2)
    found = re.findall(r"rank-(\d): input ([\d.]+) ms, .* wait ([\d.]+) ms", texts[0])
    (first, fast_input, fast_wait), (second, slow_input, slow_wait) = found
    assert (first, second) == ("0", "1")
    assert float(slow_input) > 90 > float(fast_input)
    assert float(fast_wait) > 50 > float(slow_wait)
