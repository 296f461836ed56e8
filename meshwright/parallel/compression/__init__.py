"""Gradient compression between replicas."""
