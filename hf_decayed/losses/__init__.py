"""Losses: functions from tensors to a number. They import nothing else of the package."""
