"""Weights in flight: process groups, the learner's publisher and the generators' receiver."""
