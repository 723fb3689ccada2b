"""Decides what runs in every step. Pure: see `scheduler`."""
