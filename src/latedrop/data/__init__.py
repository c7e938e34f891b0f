"""Data that go in: arrays, tables, batches, items, and their rows.

It may import the modules beside the rooms, and no room.
"""
