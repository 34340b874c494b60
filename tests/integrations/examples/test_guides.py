"""What the guides of the frameworks have beside their scripts."""

from __future__ import annotations

from tests.integrations.examples.guide_job import lines
from tests.integrations.ranks import launch


def test_the_other_lines_of_the_trainer_guide():
    """Each line trains on two ranks, and its part tells what it did."""
    for answer in launch("tests.integrations.examples.guide_job"):
        assert len(answer) == len(lines()) == 3
        compressed, rounds, pruned = (answer[name] for name in ("compress", "take_rounds", "prune"))
        assert 0 < compressed["sent_bytes"] < compressed["gradient_bytes"]
        assert rounds["rounds"] == 4 * 4  # four epochs of 32 sentences, batches of 4, two ranks
        assert 0 < pruned["pruned_share_of_all"] < 1
