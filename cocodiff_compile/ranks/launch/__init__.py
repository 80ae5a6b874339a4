"""Joins the ranks that a launcher started: finds the rank, the rendezvous and the transport."""
