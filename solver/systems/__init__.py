"""What a plan holds for each system: R2SP's ring, H-PS's pipelines and bits, the global batch by goodput."""
