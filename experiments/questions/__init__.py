"""What the sources leave open and was asked: of runs that are simulated, or trained on this machine."""
