"""One worker of a run: join, attach a model, claim samples, compute, push."""
