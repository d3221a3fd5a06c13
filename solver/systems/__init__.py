"""The parts of a plan for single systems: R2SP's ring, H-PS's pipelines and bits, the batch by goodput."""
