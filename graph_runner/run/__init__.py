"""Runs models through llama.cpp."""
