"""Experiments on optical flow."""
