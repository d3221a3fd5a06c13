"""Checkpoints: a store's state in a folder, written while others train, whole or not at all.

tensors.py writes and verifies files of tensors, folder.py makes folders of them that appear at once.
"""
