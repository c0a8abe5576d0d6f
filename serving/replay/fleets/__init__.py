"""Replay of whole fleets: several pools of catalogue hardware, priced in powered chip-seconds."""
