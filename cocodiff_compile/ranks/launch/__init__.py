# SPDX-License-Identifier: Apache-2.0
"""Joins the ranks that a launcher started: finds the rank, the rendezvous and the transport."""
