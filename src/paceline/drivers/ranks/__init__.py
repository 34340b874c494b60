"""Ranks without a server: what averaging, rounds and pipelines share.

In a script, where ranks train one model together (averaging, rounds):

group          a process group of their own: all agree, or all raise; all begin with one model
tracked_model  which tensors of a model and its optimiser all ranks hold alike
heartbeats     who is alive
lifecycle      it ends once: in good order, or with its first error

In a recipe:

launch        this process's rank, from torchrun's variables; or fork all ranks on this machine
rendezvous    ranks agree through the store on who takes part, also after a restart, and make the process group
checkpoints   each rank writes its own; all resume from the newest round of which every rank has one
run           the run loop: steps, evaluations, checkpoints, the end; and the record of times

    launch: place_in / LocalRanks ──> runs/ranks.py: train_rank ──> rendezvous: joined ──> checkpoints: agreed_start
        ──> AveragingRun(...).run(state) ──> rank 0 returns the trace; the process group is destroyed
"""
