"""Finds Ulysses attentions in a graph, or says why something that looks like one is none."""
