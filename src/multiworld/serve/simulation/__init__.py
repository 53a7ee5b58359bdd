"""Simulation of autoscaling policies on traces of requests, without workers."""
