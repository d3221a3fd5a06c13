"""The parameter store as Python sees it: `Store`, its staging buffers, policies, codecs and segments."""

from pyps.store.store import Store as Store
