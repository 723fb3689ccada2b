"""The scheduler on a virtual clock with a modelled card: capacity, traces and policies without a GPU. Pure."""
