"""What the parts of Gristmill agree on: ids, limits, operations, usage, errors and HTTP messages.

Imports nothing of ours. Every other package may import this one.
"""
