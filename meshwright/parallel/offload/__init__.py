"""Offload: masters, optimizer states, parameters and activations in host memory."""
