"""Runs on Kubernetes: their manifests, and kubectl to apply, inspect and end them."""

from meshwright.launch.kubernetes.kubectl import PREFIX, Place
from meshwright.launch.kubernetes.manifests import manifests
from meshwright.launch.kubernetes.request import KINDS, Request, request_of
from meshwright.launch.kubernetes.runs import cancel, logs, status_of, submit
from meshwright.launch.kubernetes.text import yaml_text

__all__ = [
    "KINDS",
    "PREFIX",
    "Place",
    "Request",
    "cancel",
    "logs",
    "manifests",
    "request_of",
    "status_of",
    "submit",
    "yaml_text",
]
