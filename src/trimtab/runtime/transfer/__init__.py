"""Replica transfers: weights to slots, gradients to home ranks."""
