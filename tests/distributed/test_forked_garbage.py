"""A process that is forked does not destroy process groups that its parent had let go of.

A DataLoader's worker died with signal 11: its garbage collector found a group of a synchronizer that was closed long
before, in a cycle of references, and the group's destructor waited for threads that a forked process does not have.
"""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, os
import torch.distributed as dist
from paceline.distributed.groups import make_group

gc.disable()  # or the parent itself would collect it, now and then
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = make_group([0], "gloo", 5.0)
dist.destroy_process_group(group)
cycle = [group]
cycle.append(cycle)
del group, cycle
child = os.fork()
if not child:
    gc.collect()
    os._exit(0)
print("ended with", os.waitpid(child, 0)[1])
"""


def test_a_forked_process_lets_groups_of_its_parent_alone():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == ["ended", "with", "0"]
