"""The user's model: its private copy, its sites, its weights, and how it is called.

It may import `data`.
"""
