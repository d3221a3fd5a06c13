"""A worker's steps without I/O: which calls they make, in what order, and what an error ends."""
