"""The same programs as mixed-integer ones: constraints that tie workers, lower bounds, independent checks."""
