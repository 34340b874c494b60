"""What drives the core: a virtual clock here, real processes elsewhere. Drivers do not know each other."""
