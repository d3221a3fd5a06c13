"""While a run trains: what a device costs by now, and when to move samples."""
