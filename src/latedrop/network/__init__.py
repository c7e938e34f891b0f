"""The user's model: its private copy, its sites, and how it is called.

It may import `data`.
"""
