"""Runs on a Ray cluster: submitted, kept going, resized, cancelled; the face needs neither Ray nor torch."""

from meshwright.launch.ray.connection import NoCluster
from meshwright.launch.ray.record import FOLDER, Submission
from meshwright.launch.ray.status import cancel, is_active, outcome, status_of

__all__ = ["FOLDER", "NoCluster", "Submission", "cancel", "is_active", "outcome", "status_of"]
