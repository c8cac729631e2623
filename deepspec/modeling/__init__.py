"""Drafters, the layers they are made of, and the target seen through the few things a drafter needs from it."""
