"""Ranks of a recipe, whatever they do together: averages or pipelines.

launch        which rank of how many this process is; ranks that are started here, on this machine
rendezvous    how the ranks of a launch find each other, also after a restart
checkpoints   each rank keeps its own, and all go on from the newest that every one of them has
run           the one run loop: steps, evaluations, checkpoints, the end; and the record of what happened
"""
