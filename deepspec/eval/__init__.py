"""Decoding losslessly with a drafter, and measuring what that is worth."""
