"""Tracing: the recorded forward pass of a model, as a program that can be cut."""
