"""Makes ranks agree on what they compile and run. If they do not, all of them raise, and no rank is
left in a collective.
"""
