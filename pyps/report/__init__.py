"""Define what a run did, from its folder: figures (report.py) and a trace for Perfetto (trace.py).

Both are functions of the run's setup, step records and events (pyps.formats).
"""
