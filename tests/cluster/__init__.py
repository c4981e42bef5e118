"""Clusters: their files checked offline, and clusters of costless engines on one machine."""
