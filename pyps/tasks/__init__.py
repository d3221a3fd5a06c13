"""Define what is trained: a task as a value (task.py), built-in tasks (builtin.py), tasks by name
(by_name.py).
"""

from pyps.tasks.by_name import load_task
from pyps.tasks.task import TrainingTask

__all__ = ["TrainingTask", "load_task"]
