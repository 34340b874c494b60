"""What the parts cost on this machine in seconds, bytes and memory: lanes take turns, the best of several counts."""
